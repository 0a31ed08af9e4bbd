"""One process of a machine compiles at a time, so that the ranks of a node do not all compile the same kernels.

Who comes second waits and then finds the kernel in the cache. The lock is a file of this user's, held by the process
and gone with it. Where it cannot be had, or its holder does not come to an end, everybody compiles, as without it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_SECONDS = 300.0
"""All kernels together take a tenth of this."""

_THREADS = threading.RLock()
_depth = 0


@contextmanager
def compiling_alone(path: Path | None = None, *, seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the lock; may be nested, since a kernel that is compiled compiles the kernels it calls."""
    global _depth
    with _THREADS:
        handle = _acquired(path or _default_path(), seconds) if _depth == 0 else None
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
            if handle is not None:
                os.close(handle)


def _default_path() -> Path:
    return Path(tempfile.gettempdir()) / f"foremoe-kernels-{os.getuid()}.lock"


def _acquired(path: Path, seconds: float) -> int | None:
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
        except OSError:
            pass
        return handle
