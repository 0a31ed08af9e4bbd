"""Building images with buildah, in a storage of our own, and reading what it built.

chroot isolation on the host's network needs no container runtime and leaves no bridge, firewall rule
or sysctl behind. Every call runs in mount and PID namespaces of its own: a killed build ends as a whole
and leaves no mount, and the mount of its storage onto itself, which no hard link could cross, is not
seen outside. Images stay unpacked in the storage, one folder per layer (containers/storage's
overlay layout); `imagestore` links those folders into the nodes.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foremoe_cluster import processes
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.leftovers import IMAGE_BUILD_ROLE
from foremoe_cluster.progress import Progress
from foremoe_cluster.settings import BUILD, PROCESS_MARK
from foremoe_cluster.shell import run

STORAGE = BUILD / "storage"
TEMPORARY = BUILD / "tmp"
ALONE = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc")
GLOBAL = ("--root", f"{STORAGE}", "--runroot", f"{BUILD}/run", "--storage-driver", "overlay")
LIMITS = BUILD / "containers.conf"


@dataclass(frozen=True, kw_only=True)
class BuiltLayer:
    """One layer: digest of its tar, size of its content in bytes, folder with that content."""

    diff_id: str
    size: int
    folder: Path


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image in the storage: its configuration, byte for byte, and its layers, lowest first."""

    name: str
    config: bytes
    layers: tuple[BuiltLayer, ...]

    @property
    def unpacked_bytes(self) -> int:
        """Size of all layers' files."""
        return sum(layer.size for layer in self.layers)


def buildah(*argv: str | Path, timeout: float = 3600.0) -> str:
    """A buildah command on our storage."""
    return run(*ALONE, "buildah", *GLOBAL, *argv, env=_environment(), timeout=timeout)


def build(argv: Sequence[str], context: Path, progress: Progress) -> set[str]:
    """`buildah bud` with the given options; each step's name is shown as it begins.

    The ids of all images that this build made or took from its cache are returned (long or short ones,
    as buildah prints them): what `prune` has to keep so that the next build is quick.
    """
    words = [
        *ALONE,
        "buildah",
        *GLOBAL,
        "bud",
        "--layers",
        "--isolation",
        "chroot",
        "--network",
        "host",
        *argv,
        str(context),
    ]
    output: list[str] = []
    with subprocess.Popen(
        words, env={**os.environ, **_environment()}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if "STEP" in line:
                progress(line.strip()[:100])
    if process.returncode != 0:
        raise ClusterError(f"the image build failed: {' '.join(words)}\n{''.join(output[-25:])}")
    return used_images(output)


def used_images(output: Iterable[str]) -> set[str]:
    """Image ids in the output of a build: `--> ID` for new ones, `--> Using cache ID`."""
    matches = (re.fullmatch(r"--> (?:Using cache )?([0-9a-f]{11,64})", line.strip()) for line in output)
    return {match.group(1) for match in matches if match}


def exists(name: str) -> bool:
    """Whether the storage has an image of this name."""
    return any(name in (image.get("names") or []) for image in json.loads(buildah("images", "--json")))


def inspect(name: str) -> BuiltImage:
    """Read an image out of the storage."""
    config = json.loads(buildah("inspect", "--type", "image", name))["Config"].encode()
    images = json.loads((STORAGE / "overlay-images" / "images.json").read_text())
    top = next(image["layer"] for image in images if name in image.get("names", []))
    layers = {layer["id"]: layer for layer in json.loads((STORAGE / "overlay-layers" / "layers.json").read_text())}
    chain: list[BuiltLayer] = []
    current: str | None = top
    while current:
        layer = layers[current]
        folder = STORAGE / "overlay" / current / "diff"
        chain.insert(0, BuiltLayer(diff_id=layer["diff-digest"], size=layer.get("diff-size", 0), folder=folder))
        current = layer.get("parent")
    expected = json.loads(config)["rootfs"]["diff_ids"]
    if [layer.diff_id for layer in chain] != expected:
        raise ClusterError(
            f"{name}: buildah's storage and the image's configuration disagree; `down --purge` and repeat"
        )
    return BuiltImage(name=name, config=config, layers=tuple(chain))


def clean() -> None:
    """End builds that were killed, and forget their working containers and files."""
    release()
    buildah("rm", "--all")
    shutil.rmtree(TEMPORARY, ignore_errors=True)


def release() -> None:
    """End what a killed build left running; the kernel does the rest."""
    pids = [pid for pid, role in processes.find().items() if role == IMAGE_BUILD_ROLE]
    processes.kill(pids)
    processes.wait_gone(pids, 5.0)


def prune(used: Collection[str]) -> None:
    """Remove nameless images but those with an id in `used`. buildah's own prune would remove its cache too."""
    dangling = [image["id"] for image in json.loads(buildah("images", "--all", "--json")) if not image.get("names")]
    unused = [image for image in dangling if not any(image.startswith(short) for short in used)]
    while unused:  # children go before their parents
        left = [image for image in unused if not _removed(image)]
        if len(left) == len(unused):
            return
        unused = left


def _removed(image: str) -> bool:
    try:
        buildah("rmi", image)
    except ClusterError:
        return False
    return True


def _environment() -> dict[str, str]:
    """Limits that can be reached without CAP_SYS_RESOURCE, a place for scratch files, and our mark."""
    TEMPORARY.mkdir(parents=True, exist_ok=True)
    LIMITS.write_text('[containers]\ndefault_ulimits = ["nofile=8192:16384", "nproc=16384:32768"]\n')
    return {"CONTAINERS_CONF": str(LIMITS), "TMPDIR": str(TEMPORARY), PROCESS_MARK: IMAGE_BUILD_ROLE}
