"""The nodes' parent cgroups, in every hierarchy of cgroup v1 or in the one of v2.

kubelet wants its `cgroupRoot` to exist everywhere. In v1's cpuset hierarchy a new group is empty and
takes no process until it is told its CPUs and memory nodes; in v2 each controller has to be handed down.
"""

from collections.abc import Iterable
from pathlib import Path

from foremoe_cluster.settings import CGROUP, Node

ROOT = Path("/sys/fs/cgroup")
V2_CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids", "hugetlb")


def hierarchies(mounts: str) -> list[Path]:
    """Mount points of all cgroup hierarchies, from the text of /proc/mounts."""
    fields = (line.split() for line in mounts.splitlines())
    return [Path(field[1]) for field in fields if len(field) > 2 and field[2] in ("cgroup", "cgroup2")]


def create(node: Node) -> None:
    """Make the node's group in every hierarchy."""
    mounted = hierarchies(Path("/proc/mounts").read_text())
    for hierarchy in mounted:
        outer = hierarchy / CGROUP
        for group in (outer, outer / node.name):
            group.mkdir(exist_ok=True)
            _inherit_cpuset(group)
            _hand_down(group.parent)
        _hand_down(outer / node.name)


def existing() -> list[Path]:
    """Our groups, deepest first."""
    tops = {path for path in (hierarchy / CGROUP for hierarchy in _all_hierarchies()) if path.is_dir()}
    return [path for top in sorted(tops) for path in _depth_first(top)]


def processes() -> set[int]:
    """Processes in our groups."""
    found: set[int] = set()
    for group in existing():
        try:
            found.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
        except OSError:
            continue
    return found


def _all_hierarchies() -> Iterable[Path]:
    return hierarchies(Path("/proc/mounts").read_text())


def _depth_first(group: Path) -> list[Path]:
    try:
        children = [child for child in group.iterdir() if child.is_dir()]
    except OSError:
        return []
    return [path for child in children for path in _depth_first(child)] + [group]


def _inherit_cpuset(group: Path) -> None:
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = group / name
        if file.exists() and not (group / "cgroup.controllers").exists() and not file.read_text().strip():
            file.write_text((group.parent / name).read_text())


def _hand_down(group: Path) -> None:
    control = group / "cgroup.subtree_control"
    if not control.exists():
        return
    available = (group / "cgroup.controllers").read_text().split()
    for controller in V2_CONTROLLERS:
        if controller in available:
            control.write_text(f"+{controller}")
