"""The default strategy: step replicas from the whole step, dynamic replicas for what is left, exact splits.

Problem and parts: "Harnessing Routing Foresight for Micro-step-level MoE load balancing in RL Post-training"
(arXiv 2606.11867). The algorithms are our own and described in docs/planner.md.

Several candidates are made and priced by the cost model: no replicas, the hosts of the step before, new step
replicas on the homes as they are, and with home moves. The cheapest is taken; within the configured
indifference the previous hosts are kept. "No replicas" is always among them, so a plan is never modelled
slower than none.
"""

from __future__ import annotations

from collections.abc import Iterator

from foremoe.planner._assign import assign_plan, dynamic_plan, layout_from_hosts, without_small_shares
from foremoe.planner._flow import Ints, Layout
from foremoe.planner.base import BasePlacement
from foremoe.planner.plan import Bools, Plan, StepPlan
from foremoe.planner.polish import COARSE, polished
from foremoe.planner.problem import MicroProblem, Problem, StepProblem
from foremoe.planner.replicas import search_replicas


class ForeMoE:
    """Plans from known routing; never modelled slower than doing nothing."""

    def plan_micro_step(self, problem: MicroProblem) -> Plan:
        """Exact assignment over the copies in place, with dynamic replicas if they pay."""
        layout = layout_from_hosts(problem.hosts_RE)
        return micro_plan(problem, layout, problem.load_SE, problem.hosts_RE, problem.base.home_E, problem.resident_RE)

    def plan_step(self, problem: StepProblem) -> StepPlan:
        """The cheapest candidate for the step under the cost model."""
        best: StepPlan | None = None
        kept: StepPlan | None = None
        for name, base, hosts_RE in _candidates(problem):
            plan = priced_step(problem, name, base, hosts_RE)
            if name == "previous":
                kept = plan
            if best is None or plan.modelled_seconds < best.modelled_seconds:
                best = plan
        assert best is not None
        if kept is not None and kept.modelled_seconds <= best.modelled_seconds * (1 + problem.config.indifference):
            return kept
        return best


def _candidates(problem: StepProblem) -> Iterator[tuple[str, BasePlacement, Bools]]:
    base, config = problem.base, problem.config
    yield "static", base, problem.home_hosts_RE
    previous = problem.previous
    if previous is not None and previous.base == base and _fits(problem, previous.hosts_RE):
        yield "previous", base, previous.hosts_RE
    if problem.slots_R[0].any():
        yield "replicas", *search_replicas(problem, max_moves=0)
    if config.max_moves != 0:
        moves = base.experts if config.max_moves is None else config.max_moves
        yield "moves and replicas", *search_replicas(problem, max_moves=moves)


def _fits(problem: StepProblem, hosts_RE: Bools) -> bool:
    """True if the hosts of an earlier step respect the slots there are now."""
    return bool((hosts_RE.sum(axis=1) <= problem.home_slots + problem.slots_R[0]).all())


def priced_step(problem: StepProblem, name: str, base: BasePlacement, hosts_RE: Bools) -> StepPlan:
    """Plan all micro-steps on given hosts and price the step, pushes and moves included."""
    layout = layout_from_hosts(hosts_RE)
    plans = tuple(micro_plan(problem, layout, load_SE, hosts_RE, base.home_E) for load_SE in problem.load_MSE)
    return StepPlan(
        base=base,
        hosts_RE=hosts_RE,
        plans=plans,
        chosen=name,
        modelled_seconds=problem.step_seconds(plans, hosts_RE, base),
        moves=base.moved_from(problem.base),
    )


def micro_plan(
    problem: Problem,
    layout: Layout,
    load_SE: Ints,
    hosts_RE: Bools,
    home_E: Ints,
    resident_RE: Bools | None = None,
) -> Plan:
    """One micro-step on given hosts, with dynamic replicas where they are allowed, needed and pay."""
    plan = assign_plan(
        load_SE, layout, home_E=home_E, topology=problem.topology, capacity_R=problem.capacity_R, present_RE=hosts_RE
    )
    least = problem.config.min_tokens_per_replica
    if least > 1:
        plan = without_small_shares(plan, least, problem.topology)
    dynamic_R = problem.slots_R[1]
    if not dynamic_R.any() or plan.imbalance <= 1 + problem.config.tolerance:
        return plan
    other = dynamic_plan(
        load_SE,
        layout,
        home_E=home_E,
        topology=problem.topology,
        capacity_R=problem.capacity_R,
        slots_R=dynamic_R,
        tolerance=problem.config.tolerance,
        min_share=least,
        present_RE=hosts_RE if resident_RE is None else hosts_RE | resident_RE,
        resident_RE=resident_RE,
    )
    if other.imbalance > 1 + problem.config.tolerance + COARSE and layout.host_C.size == home_E.size:
        other = polished(
            other,
            topology=problem.topology,
            slots_R=dynamic_R,
            tolerance=problem.config.tolerance,
            seed=problem.config.seed,
        )
    if least > 1:
        other = without_small_shares(other, least, problem.topology)
    return other if problem.seconds(other) < problem.seconds(plan) else plan
