"""One process at a time compiles; nobody waits for ever, and nobody needs the lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foremoe.planner._compile_lock import compiling_alone

TRY = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=1); input()"


def is_free(path: Path) -> bool:
    return subprocess.run([sys.executable, "-c", TRY, str(path)], capture_output=True).returncode == 0


@contextmanager
def held_by_another_process(path: Path) -> Iterator[None]:
    argv = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        yield
        holder.communicate(b"\n")


def test_the_lock_is_held_to_the_end_of_the_outermost(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with compiling_alone(path):
        with compiling_alone(path):
            pass
        assert not is_free(path)
    assert is_free(path)


def test_a_holder_that_does_not_end_is_waited_for_no_longer_than_told(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held_by_another_process(path), compiling_alone(path, seconds=0.1):
        pass


def test_without_a_place_for_the_lock_there_is_none(tmp_path: Path) -> None:
    with compiling_alone(tmp_path / "no" / "such" / "folder"):
        pass
