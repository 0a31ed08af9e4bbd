"""Debian packages the cluster needs, installed when one of their programs is missing."""

import os
import shutil

from foremoe_cluster.errors import ClusterError
from foremoe_cluster.progress import phase
from foremoe_cluster.shell import run

RUNNING = {
    "ip": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "unshare": "util-linux",
}
"""Program -> package, for running the cluster. kube-proxy speaks nftables, the portmap plugin iptables."""

BUILDING_PROGRAMS = {
    "gcc": "gcc",
    "pkg-config": "pkg-config",
    "/usr/include/stdio.h": "libc6-dev",
    "/usr/include/seccomp.h": "libseccomp-dev",
}
"""For building runc, the one program that is partly C."""

BUILDING_IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}

BROWSER = {"chromium": "chromium"}
"""For the test that opens the simulator's report."""


def ensure(needed: dict[str, str]) -> None:
    """Install what is missing; a no-op where all is there. Raises ClusterError where apt-get fails or is no option."""
    missing = sorted({package for program, package in needed.items() if not _present(program)})
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise ClusterError(f"please install: {', '.join(missing)} (this is no Debian, so it is left to you)")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with phase(f"Debian packages: {' '.join(missing)}"):
        run("apt-get", "update", "-qq", env=quiet, timeout=300)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, env=quiet, timeout=600)


def _present(program: str) -> bool:
    return os.path.exists(program) if program.startswith("/") else shutil.which(program) is not None
