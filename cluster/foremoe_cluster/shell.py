"""Running other programs and waiting for things, with errors that can be read."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from foremoe_cluster.errors import ClusterError
from foremoe_cluster.settings import LOGS, PROCESS_MARK

T = TypeVar("T")


def run(
    *argv: str | Path,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
) -> str:
    """Standard output of a command that has to succeed. `env` is added to the environment."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            input=stdin,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            timeout=timeout,
            text=True,
            capture_output=True,
        )
    except FileNotFoundError:
        raise ClusterError(f"{words[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"no end after {timeout:.0f} s: {' '.join(words)}") from None
    if done.returncode != 0:
        raise ClusterError(f"exit code {done.returncode}: {' '.join(words)}\n{(done.stderr or done.stdout).strip()}")
    return done.stdout


def start(
    role: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, log: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program that outlives us, marked with its role and writing to `log` or logs/ROLE.log."""
    path = log or log_of(role)
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", **(env or {}), PROCESS_MARK: role}
    with path.open("ab") as output:
        return subprocess.Popen(
            [str(word) for word in argv],
            env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


def log_of(role: str) -> Path:
    """The log of a program."""
    return LOGS / f"{role}.log"


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log, for an error message."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


def wait_for(
    what: str, probe: Callable[[], T | None], *, seconds: float, interval: float = 0.1, hint: Callable[[], str] = str
) -> T:
    """The probe's first answer that is true; after `seconds` an error that ends with the hint."""
    end = time.monotonic() + seconds
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > end:
            raise ClusterError(f"{what}: not after {seconds:.0f} s\n{hint()}".rstrip())
        time.sleep(interval)
