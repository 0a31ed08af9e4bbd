"""What the machine looks like: everything a cluster touches outside its own folder.

Two snapshots are compared by `difference`, to prove that up and down leave the machine as found. It
knows nothing of our names and marks, so it also sees what our own clean-up does not look for.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foremoe_cluster.cgroups import hierarchies
from foremoe_cluster.settings import STATE
from foremoe_cluster.shell import run

FOLDERS = tuple(Path(name) for name in ("/etc", "/etc/cni", "/opt", "/run", "/var/lib", "/var/log", "/var/run"))
VOLATILE = (
    "fs/dentry-state", "fs/file-nr", "fs/inode-nr", "fs/inode-state", "fs/aio-nr", "fs/binfmt_misc", "fs/quota",
    "kernel/ns_last_pid", "kernel/pty/nr", "kernel/random", "net/netfilter/nf_conntrack_count", "vm/stat_refresh",
)  # fmt: skip
"""Parts of /proc/sys that count or draw lots; no settings."""

Facts = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Facts by category, then by name."""

    categories: Mapping[str, Facts]


def take(*, since: float | None = None) -> Snapshot:
    """Look at the machine. Of processes only orphans younger than `since` (seconds after boot) are facts."""
    mounts = Path("/proc/self/mounts").read_text()
    return Snapshot(
        categories={
            "processes": orphans(since) if since is not None else {},
            "mounts": _lines(mounts),
            "network namespaces": _namespaces("net"),
            "mount namespaces": _namespaces("mnt"),
            "links": _lines(run("ip", "-br", "link")),
            "addresses": _lines(run("ip", "-o", "address")),
            "routes": _lines(
                run("ip", "route", "show", "table", "all") + run("ip", "-6", "route", "show", "table", "all")
            ),
            "routing rules": _lines(run("ip", "rule")),
            "firewall rules": _lines(run("nft", "list", "ruleset")) if shutil.which("nft") else {},
            "cgroups": {path: "" for root in hierarchies(mounts) for path, _, _ in os.walk(root) if path != str(root)},
            "sysctls": _sysctls(),
            "files": {str(path): "" for folder in FOLDERS if folder.is_dir() for path in folder.iterdir()},
        }
    )


def difference(before: Snapshot, after: Snapshot) -> list[str]:
    """One line per fact that is new, gone or changed; the cluster's own folder, whose images are kept, is none."""
    lines: list[str] = []
    for category, old in before.categories.items():
        new = after.categories[category]
        for name in sorted(old.keys() | new.keys()):
            if name == str(STATE) or old.get(name) == new.get(name):
                continue
            kind = "gone" if name not in new else "new" if name not in old else f"{old[name]} -> {new[name]}"
            lines.append(f"{category}: {name} ({kind})")
    return lines


def orphans(since: float) -> Facts:
    """Processes started after `since` whose parent is gone: what a program leaves when it has ended.

    Children of living processes are their parents' business: on a shared machine they come and go.
    """
    found: dict[str, str] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        parent, started = int(fields[1]), int(fields[19]) / ticks
        if parent == 1 and started > since and command:
            found[f"{path.name} {command[:120]}"] = ""
    return found


def uptime() -> float:
    """Seconds after boot, the clock of `take`."""
    return float(Path("/proc/uptime").read_text().split()[0])


def _namespaces(kind: str) -> Facts:
    """Namespaces of that kind with a living process, named by one of its commands."""
    found: dict[str, str] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                found[os.readlink(path / "ns" / kind)] = ""
            except OSError:
                continue
    return found


def _sysctls() -> Facts:
    root = Path("/proc/sys")
    values: dict[str, str] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            key = str(path.relative_to(root))
            if not key.startswith(VOLATILE):
                try:
                    values[key] = " ".join(path.read_text(errors="replace").split())
                except OSError:
                    continue
    return values


def _lines(text: str) -> Facts:
    """Each line a fact, times and counters that run on left out."""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        for mark in ("expires", "valid_lft", "preferred_lft"):
            if mark in words:
                words = words[: words.index(mark)]
        facts[" ".join(words)] = ""
    return facts
