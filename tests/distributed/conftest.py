from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.launch import Pools


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Process groups by size, shared by the tests of a module.

    Not by all tests: each of the many groups that cases make has threads that wake up many times a second for as long
    as the process lives, and destroying groups is no way out, since torch gives their names to new ones.
    """
    started = Pools()
    yield started
    started.close()
