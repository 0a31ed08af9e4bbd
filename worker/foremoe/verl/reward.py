"""Reward for reasoning-gym tasks: the library's own verifier, plus a small term for form.

Select it with `reward.custom_reward_function.path=pkg://foremoe.verl.reward`. The verifier decides; the form term only
helps a policy that hardly ever answers: it pays for an answer of nothing but the answer, right or wrong. Both are
reported apart, so that a rising reward can be told from better form.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

from foremoe.errors import LaunchError

FORM_WEIGHT = 0.1
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Score of one sample: `score` = verifier's score + 0.1 * form; `verified` and `form` are its parts.

    `extra_info` is what `foremoe data create` wrote: the task's name and the library's entry as JSON.
    Raises LaunchError for rows that did not come from it.
    """
    info = extra_info or {}
    if "task" not in info or "entry" not in info:
        raise LaunchError(f"row of {data_source} lacks the entry its verifier needs: create data with foremoe data")
    entry = json.loads(info["entry"])
    answer = solution_str.strip()
    verified = float(verifier(info["task"])(answer, entry))
    form = float(has_form_of(answer, ground_truth))
    return {"score": verified + FORM_WEIGHT * form, "verified": verified, "form": form}


@functools.cache
def verifier(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The library's scoring function of a task, a number in [0, 1]."""
    import reasoning_gym

    score: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(task)
    return score


def has_form_of(answer: str, ground_truth: str) -> bool:
    """True if `answer` is bare: one number where a number is asked for, else one line of text."""
    if _NUMBER.fullmatch(ground_truth.strip()):
        return _NUMBER.fullmatch(answer) is not None
    return bool(answer) and "\n" not in answer
