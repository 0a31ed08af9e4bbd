"""No balancing: every expert is computed at its home. The baseline of every comparison."""

from __future__ import annotations

from foremoe.planner._assign import assign_plan, layout_from_hosts
from foremoe.planner.plan import Plan, StepPlan
from foremoe.planner.problem import MicroProblem, StepProblem


class Static:
    """Plain expert parallelism; slots are ignored."""

    def plan_micro_step(self, problem: MicroProblem) -> Plan:
        """All tokens at home."""
        return assign_plan(
            problem.load_SE,
            layout_from_hosts(problem.home_hosts_RE),
            home_E=problem.base.home_E,
            topology=problem.topology,
            capacity_R=problem.capacity_R,
        )

    def plan_step(self, problem: StepProblem) -> StepPlan:
        """All tokens at home, in every micro-step."""
        layout = layout_from_hosts(problem.home_hosts_RE)
        plans = tuple(
            assign_plan(
                load_SE,
                layout,
                home_E=problem.base.home_E,
                topology=problem.topology,
                capacity_R=problem.capacity_R,
            )
            for load_SE in problem.load_MSE
        )
        return StepPlan(
            base=problem.base,
            hosts_RE=problem.home_hosts_RE,
            plans=plans,
            chosen="static",
            modelled_seconds=problem.step_seconds(plans, problem.home_hosts_RE, problem.base),
        )
