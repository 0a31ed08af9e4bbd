"""What strategies that look back may know: the loads of earlier steps, and when they last re-placed."""

from __future__ import annotations

import numpy as np

from foremoe.planner.plan import Ints
from foremoe.planner.problem import StepProblem


def past_load_E(problem: StepProblem) -> Ints | None:
    """Loads of the last `history_steps` steps, summed: int64 [E]; None before the first step has ended."""
    previous = problem.previous
    if previous is None or previous.history_HE is None:
        return None
    total: Ints = previous.history_HE[: problem.config.history_steps].sum(axis=0)
    return total


def with_this_step(problem: StepProblem) -> Ints:
    """History to hand to the next step, newest first: int64 [H, E]."""
    load_E: Ints = problem.load_MSE.sum(axis=(0, 1))[None, :]
    previous = problem.previous
    if previous is None or previous.history_HE is None:
        return load_E
    history: Ints = np.concatenate([load_E, previous.history_HE])[: problem.config.history_steps]
    return history


def replacement_due(problem: StepProblem) -> bool:
    """True if this step may change what a history-based strategy placed before."""
    previous = problem.previous
    return previous is None or previous.age_steps + 1 >= problem.config.rebalance_steps or previous.age_steps < 0
