"""The base image where none can be pulled: Debian with Python, by debootstrap.

Stands in for `python:3.11-slim` (the Dockerfile's default): the same Debian release as the host, its
Python, certificates, and nothing for people to read.
"""

import shutil
from pathlib import Path
from typing import Final

from foremoe_cluster.buildah import buildah, exists
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.progress import Progress
from foremoe_cluster.settings import BUILD
from foremoe_cluster.shell import run

INCLUDED: Final = ("ca-certificates", "python3")
USELESS: Final = (
    "usr/share/doc", "usr/share/info", "usr/share/lintian", "usr/share/locale", "usr/share/man",
    "var/cache/apt", "var/cache/debconf", "var/lib/apt/lists", "var/log",
)  # fmt: skip
REVISION: Final = "1"
"""Raise it when the recipe changes."""


def ensure(progress: Progress) -> str:
    """The name of the base image, made now if it is not in the storage."""
    release = _release()
    name = f"localhost/foremoe-base:{release}-{REVISION}"
    if not exists(name):
        _make(name, release, progress)
    return name


def _make(name: str, release: str, progress: Progress) -> None:
    root = BUILD / "rootfs"
    shutil.rmtree(root, ignore_errors=True)
    progress("debootstrap")
    included = f"--include={','.join(INCLUDED)}"
    run("debootstrap", "--variant=minbase", included, release, root, mirror(release), timeout=900)
    slim(root)
    progress("commit")
    container = buildah("from", "scratch").strip()
    archive = BUILD / "rootfs.tar"  # an archive keeps its owners, a folder would become root's
    run("tar", "-C", root, "-cf", archive, ".")
    buildah("add", container, archive, "/")
    buildah("config", "--env", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    buildah("commit", "--rm", "--format", "oci", container, name)
    archive.unlink()
    shutil.rmtree(root)


def slim(root: Path) -> None:
    """Empty the folders nobody reads in a container, and forget which mirror it came from."""
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    for name in USELESS:
        folder = root / name
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def mirror(release: str) -> str:
    """The archive this machine's apt uses; debootstrap's own default may not be reachable."""
    lines = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)").splitlines()
    for line in lines:
        address, *rest = line.split()
        if rest == [release, "main"]:
            return address
    raise ClusterError(
        f"apt knows no archive of {release}; set BASE_IMAGE to an image of Python 3.11 that can be pulled"
    )


def _release() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.partition("=")[2].strip('"')
    raise ClusterError("/etc/os-release names no Debian release; set BASE_IMAGE to an image of Python 3.11")
