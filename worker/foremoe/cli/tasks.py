"""Problems of the `reasoning-gym` library as prompts and answers.

The library generates problems procedurally and scores answers itself, so its data needs no download and its reward no
judge. Problems are made distinct by their question before they are split, because small settings repeat quickly: a
validation question never also occurs in training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from foremoe.errors import LaunchError

DEFAULT_TASK = "chain_sum"
# Small enough that the toy model of `foremoe model create` learns it in a few dozen steps.
DEFAULT_SETTINGS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
}
# A generator that yields this many repeats in a row has, for our purposes, run out of distinct problems.
_MAX_REPEATS = 2000


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of the library, by name, and the settings of its generator."""

    name: str = DEFAULT_TASK
    settings: dict[str, Any] = field(default_factory=dict)

    def resolved(self) -> dict[str, Any]:
        """Settings with the defaults for this task filled in."""
        return {**DEFAULT_SETTINGS.get(self.name, {}), **self.settings}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question, its answer, and the library's whole entry, which its verifier needs."""

    question: str
    answer: str
    entry: str
    """The entry as JSON."""


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`["max_terms=3"]` -> `{"max_terms": 3}`; values are JSON, or text if they are not. Raises LaunchError."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise LaunchError(f"--set takes name=value, got {pair!r}")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def distinct_problems(task: Task, count: int, *, seed: int) -> list[Problem]:
    """`count` problems with distinct questions, the same for the same seed. Raises LaunchError if there are fewer."""
    problems: dict[str, Problem] = {}
    repeats = 0
    for problem in problem_stream(task, seed=seed):
        if problem.question in problems:
            repeats += 1
            if repeats >= _MAX_REPEATS:
                raise LaunchError(
                    f"task {task.name} with {task.resolved()} has only about {len(problems)} distinct problems, "
                    f"{count} were asked for: ask for fewer, or widen the task with --set"
                )
            continue
        repeats = 0
        problems[problem.question] = problem
        if len(problems) == count:
            break
    return list(problems.values())


def problem_stream(task: Task, *, seed: int) -> Iterator[Problem]:
    """Problems without end, with repeats, the same for the same seed. Raises LaunchError for an unknown task."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task.name not in DATASETS:
        raise LaunchError(f"reasoning-gym has no task {task.name!r}; it has {', '.join(sorted(DATASETS))}")
    try:
        dataset = reasoning_gym.create_dataset(task.name, size=1 << 30, seed=seed, **task.resolved())
    except (TypeError, ValueError, AssertionError) as error:
        raise LaunchError(f"task {task.name} refuses the settings {task.resolved()}: {error}") from error
    for index in range(1 << 30):
        entry = dataset[index]
        if entry["answer"] is not None:
            yield Problem(
                question=str(entry["question"]),
                answer=str(entry["answer"]),
                entry=json.dumps(entry, default=str, sort_keys=True),
            )
