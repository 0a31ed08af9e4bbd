"""Finding the cluster's processes on the system, and ending them.

No pid files: they lie after a crash, and another checkout may not know them. Every program is started
with `PROCESS_MARK` in its environment, which its children inherit; containers are found by cgroup.
"""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from foremoe_cluster.settings import PROCESS_MARK


def marked(environ: bytes) -> str | None:
    """The role in the content of a /proc/PID/environ, None for processes that are not ours."""
    prefix = f"{PROCESS_MARK}=".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None


def find() -> dict[int, str]:
    """Role of every marked process, by pid, ourselves left out."""
    found: dict[int, str] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                role = marked((path / "environ").read_bytes())
            except OSError:
                continue
            if role is not None:
                found[int(path.name)] = role
    return found


def roles() -> dict[str, int]:
    """The first process of each role: the one whose parent is not ours. Of a node it is its `unshare`."""
    found = find()
    return {role: pid for pid, role in sorted(found.items(), reverse=True) if _parent(pid) not in found}


def kill(pids: Iterable[int]) -> None:
    """SIGKILL: the API server would wait a minute for connections that its dead etcd will never answer."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def alive(pids: Iterable[int]) -> list[int]:
    """Those that still run (a zombie does not)."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def wait_gone(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait until all have ended; the rest after `seconds`."""
    pids, end = list(pids), time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _state(pid: int) -> str:
    return _status(pid)[0]


def _parent(pid: int) -> int:
    return int(_status(pid)[1])


def _status(pid: int) -> tuple[str, str]:
    """State and parent, from /proc/PID/stat; ("", "0") where the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", "0"
    return fields[0], fields[1]
