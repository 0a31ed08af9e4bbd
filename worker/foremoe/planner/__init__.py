"""Planning expert load balance from known routing: numpy in, numpy out, exact integers, no global state."""

from foremoe.planner.api import assign, optimize_base, plan_micro_step, plan_step, warm_up
from foremoe.planner.base import BasePlacement
from foremoe.planner.config import PlannerConfig, Strategy
from foremoe.planner.plan import Copy, Plan, StepPlan

__all__ = [
    "BasePlacement",
    "Copy",
    "Plan",
    "PlannerConfig",
    "StepPlan",
    "Strategy",
    "assign",
    "optimize_base",
    "plan_micro_step",
    "plan_step",
    "warm_up",
]
