"""What any run, finished, failed or killed, may have left on the machine; and removing it.

Found on the system itself, so it does not matter which checkout made it or what happened to its
processes. `find` only looks; `remove` ends with nothing of the cluster left but the kept folders, and
may be repeated.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from foremoe_cluster import cgroups, network, processes
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.settings import KEPT, MOUNT_POINTS, STATE
from foremoe_cluster.shell import run

T = TypeVar("T")

IMAGE_BUILD_ROLE = "images"
"""Builds go on while clusters come and go; they clean up after themselves."""

MADE = STATE / "mount-points"
"""Which mount points we made: those that were there before us stay, empty or not."""

PATIENCE_SECONDS = 30.0
"""The kernel takes apart what dead processes held in the background."""


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What there is of a cluster."""

    processes: dict[int, str] = field(default_factory=dict)
    contained: frozenset[int] = frozenset()
    mounts: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    guards: tuple[str, ...] = ()
    cgroups: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(
            self.processes or self.contained or self.mounts or self.links or self.guards or self.cgroups or self.files
        )

    def summary(self) -> str:
        """One line for people."""
        counts = {
            "processes": len(set(self.processes) | self.contained),
            "mounts": len(self.mounts),
            "links": len(self.links),
            "firewall tables": len(self.guards),
            "cgroups": len(self.cgroups),
            "folders": len(self.files),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing"


def find() -> Leftovers:
    """Look at the system."""
    return Leftovers(
        processes={pid: role for pid, role in processes.find().items() if role != IMAGE_BUILD_ROLE},
        contained=frozenset(cgroups.processes()),
        mounts=tuple(_mounts()),
        links=tuple(network.links()),
        guards=tuple(network.guards()),
        cgroups=tuple(cgroups.existing()),
        files=(*_files(), *([MADE] if MADE.exists() else [])),
    )


def make_mount_points() -> None:
    """Make those that are missing, and note which before any is made, so that a killed run's are found too."""
    missing = [point for point in MOUNT_POINTS if not point.exists()]
    MADE.write_text("".join(f"{point}\n" for point in missing))
    for point in missing:
        point.mkdir(parents=True, exist_ok=True)


def remove() -> None:
    """Remove all of it. Raises ClusterError naming what would not go."""
    _end_processes(find())
    remove_each("mounts", _mounts, lambda mount: run("umount", "--lazy", mount))
    remove_each("links", network.links, network.remove_link)
    remove_each("firewall tables", network.guards, network.remove_guard)
    remove_each("cgroups", cgroups.existing, Path.rmdir)
    remove_each("folders", _files, _delete)
    _remove_mount_points()


def remove_each(
    what: str, find: Callable[[], Sequence[T]], remove: Callable[[T], object], *, seconds: float = PATIENCE_SECONDS
) -> None:
    """Remove what is found until nothing is. Raises ClusterError with the last error after `seconds`.

    Whether it is gone is asked of the system, never of the command that removed it: a network namespace
    that dies takes its cables along, perhaps just before our turn, and a cgroup is busy until the last
    of its processes has been reaped.
    """
    end = time.monotonic() + seconds
    while things := find():
        error: ClusterError | OSError | None = None
        for thing in things:
            try:
                remove(thing)
            except (ClusterError, OSError) as failure:
                error = failure
        if time.monotonic() > end:
            raise ClusterError(f"{what} that stay: {', '.join(map(str, things))}\n{error or ''}".rstrip())
        if error is not None:
            time.sleep(0.05)


def _mounts() -> list[str]:
    return mounts_below(Path("/proc/self/mounts").read_text(), STATE, without=KEPT)


def mounts_below(mounts: str, folder: Path, *, without: Iterable[Path] = ()) -> list[str]:
    """Mount points in the text of /proc/mounts that lie under `folder`, the last mounted first."""
    points = [line.split()[1].replace("\\040", " ") for line in mounts.splitlines()]
    kept = tuple(without)
    return [
        point
        for point in reversed(points)
        if Path(point).is_relative_to(folder) and not any(Path(point).is_relative_to(path) for path in kept)
    ]


def _end_processes(left: Leftovers) -> None:
    """Kill until none is left: whoever dies may have been about to start another."""
    for _ in range(20):
        pids = set(left.processes) | left.contained
        if not pids:
            return
        processes.kill(sorted(pids))
        processes.wait_gone(pids, 2.0)
        left = find()
    raise ClusterError(f"processes that do not end: {sorted(set(left.processes) | left.contained)}")


def _files() -> list[Path]:
    if not STATE.is_dir():
        return []
    return sorted(path for path in STATE.iterdir() if path not in (*KEPT, MADE) and path.name != "lock")


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_mount_points() -> None:
    """Those we made and nobody else has used since. The note goes last: a removal that is killed is repeated."""
    made = set(MADE.read_text().splitlines()) if MADE.exists() else set()
    for point in MOUNT_POINTS:
        if str(point) in made:
            with contextlib.suppress(OSError):
                point.rmdir()
    MADE.unlink(missing_ok=True)
