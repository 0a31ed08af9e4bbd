"""Settings of all property tests, and the order of all tests.

Property tests have no deadline, since no test asserts wall-clock times, and draw the same cases on every run; new cases
are looked for with `pytest --hypothesis-profile=search`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")

LAST = ("unit/moe", "unit/simulate", "unit/planner", "distributed", "cluster", "e2e")
"""Whatever else there is comes first: on a new checkout it runs while the planner's kernels are compiled."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).as_posix()
    return next((turn for turn, prefix in enumerate(LAST, start=1) if folder.startswith(f"{prefix}/")), 0)
