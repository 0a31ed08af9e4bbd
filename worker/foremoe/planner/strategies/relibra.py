"""ReLibra: experts re-ordered over nodes between batches, replicated inside their node in each micro-step.

Source: arXiv 2605.08639. Before a batch, swaps of homes balance nodes and ranks for the batch's known load; in each
micro-step hot experts get replicas on ranks of the same node, in a buffer shared by all layers, and replicas and
split are chosen together. The paper anneals swaps under a log-sum-exp surrogate; here the same two-level balance is
reached by our own swap search, so this is the paper's scheme, not its code.

Its replica buffer is given all slots of a rank, redundant and dynamic, so that comparisons use equal slots.
Homes move only as far as `max_moves` allows.
"""

from __future__ import annotations

from foremoe.planner._assign import dynamic_plan, layout_from_hosts
from foremoe.planner._flow import Layout
from foremoe.planner.homes import refined_homes
from foremoe.planner.plan import Bools, Ints, Plan, StepPlan
from foremoe.planner.problem import MicroProblem, Problem, StepProblem, homes_of


class Relibra:
    """Inter-batch re-ordering, intra-node replication."""

    def plan_micro_step(self, problem: MicroProblem) -> Plan:
        """Replicas inside the node of the expert."""
        layout = layout_from_hosts(problem.hosts_RE)
        return _inside_node(problem, layout, problem.load_SE, problem.hosts_RE, problem.base.home_E)

    def plan_step(self, problem: StepProblem) -> StepPlan:
        """Homes for the batch, replicas in every micro-step."""
        config = problem.config
        base = refined_homes(
            problem.load_MSE.sum(axis=1),
            start=problem.base,
            topology=problem.topology,
            max_moves=config.max_moves,
            seed=config.seed,
        )
        hosts_RE = homes_of(base)
        layout = layout_from_hosts(hosts_RE)
        plans = tuple(_inside_node(problem, layout, load_SE, hosts_RE, base.home_E) for load_SE in problem.load_MSE)
        return StepPlan(
            base=base,
            hosts_RE=hosts_RE,
            plans=plans,
            chosen="relibra",
            modelled_seconds=problem.step_seconds(plans, hosts_RE, base),
            moves=base.moved_from(problem.base),
        )


def _inside_node(problem: Problem, layout: Layout, load_SE: Ints, hosts_RE: Bools, home_E: Ints) -> Plan:
    step_R, dynamic_R = problem.slots_R
    return dynamic_plan(
        load_SE,
        layout,
        home_E=home_E,
        topology=problem.topology,
        capacity_R=problem.capacity_R,
        slots_R=step_R + dynamic_R,
        tolerance=problem.config.tolerance,
        min_share=problem.config.min_tokens_per_replica,
        present_RE=hosts_RE,
        inside_only=True,
    )
