"""The operator's and the worker's image: built when their inputs changed, then given to the nodes.

Inputs are the Dockerfile, the requirements, our sources, the base image, and which wheels lie in
PIP_FIND_LINKS (a CPU build of torch there makes the worker image 3 GB instead of 7).
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from foremoe_cluster import baseimage, buildah, imagestore, packages, programs
from foremoe_cluster.lifecycle import BUILD_LOCK, machine_lock
from foremoe_cluster.progress import note, phase
from foremoe_cluster.settings import BUILD, Settings
from foremoe_cluster.shell import run

ROOT: Final = Path(__file__).resolve().parent.parent.parent
"""The checkout whose images are built."""

TARGETS: Final = ("operator", "worker")
RECORD: Final = BUILD / "images.json"
INPUTS: Final = (
    "Dockerfile", ".dockerignore", "LICENSE", "README.md", "constraints.txt", "pyproject.toml",
    "cluster/foremoe_cluster/files/requirements.py", "operator", "worker",
)  # fmt: skip
IGNORED: Final = ("__pycache__", ".egg-info", ".pyc")


@dataclass(frozen=True, kw_only=True)
class Wheels:
    """Local folders of wheels (PIP_FIND_LINKS), shown to the build as /wheels/0, /wheels/1..."""

    folders: tuple[Path, ...]
    addresses: tuple[str, ...] = ()
    """Entries that are no folders are handed to pip as they are."""

    @classmethod
    def from_environment(cls) -> "Wheels":
        """What pip on this machine would look at."""
        entries = os.environ.get("PIP_FIND_LINKS", "").split()
        folders = tuple(Path(entry).resolve() for entry in entries if Path(entry).is_dir())
        return cls(folders=folders, addresses=tuple(entry for entry in entries if not Path(entry).is_dir()))

    def names(self) -> list[str]:
        """The wheels in the folders."""
        return sorted({path.name for folder in self.folders for path in folder.glob("*.whl")})

    def find_links(self) -> list[str]:
        """What pip inside the build is told."""
        return [f"/wheels/{index}" for index in range(len(self.folders))] + list(self.addresses)


def name_of(target: str) -> str:
    """The name pods use."""
    return f"localhost/foremoe-{target}:dev"


def build_and_load(settings: Settings, *, base_image: str | None = None) -> None:
    """Build both images if needed and make them available on all nodes."""
    packages.ensure(packages.BUILDING_IMAGES)
    bin_ = programs.binaries()
    with machine_lock(BUILD_LOCK):
        buildah.clean()
        base = base_image or os.environ.get("BASE_IMAGE")
        if not base:
            with phase("base image") as progress:
                base = baseimage.ensure(progress)
        wheels = Wheels.from_environment()
        record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        for target in TARGETS:
            record[name_of(target)] = _build(target, base, wheels, record.get(name_of(target), {}))
            RECORD.write_text(json.dumps(record))
        built = [buildah.inspect(name_of(target)) for target in TARGETS]
        buildah.prune({image for entry in record.values() for image in entry["used"]})
        for image in built:
            with phase(f"{image.name} ({image.unpacked_bytes / 1e6:.0f} MB) to {settings.nodes} nodes"):
                imagestore.load(image, settings.all_nodes(), bin_)


def inputs_hash(root: Path, base: str, wheels: Wheels) -> str:
    """Hash of all that goes into the images."""
    digest = hashlib.sha256()
    for path in input_files(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for word in (base, *wheels.names()):
        digest.update(word.encode() + b"\0")
    return digest.hexdigest()


def input_files(root: Path) -> Iterator[Path]:
    """The files the images are made of, in a fixed order."""
    for name in INPUTS:
        path = root / name
        if path.is_dir():
            files = (file for file in path.rglob("*") if file.is_file())
            yield from sorted(file for file in files if not any(word in str(file) for word in IGNORED))
        elif path.is_file():
            yield path


def _build(target: str, base: str, wheels: Wheels, before: dict[str, Any]) -> dict[str, Any]:
    """Build an image unless the record of the last build has the same inputs; returns the new record."""
    wanted = inputs_hash(ROOT, base, wheels)
    name = name_of(target)
    if before.get("inputs") == wanted and buildah.exists(name):
        note(f"{name} is up to date")
        return before
    with phase(f"build {name}") as progress, tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "pip.conf"
        config.write_text(pip_config(run(sys.executable, "-m", "pip", "config", "list"), wheels))
        used = buildah.build(_options(target, base, wheels, config), ROOT, progress)
    return {"inputs": wanted, "used": sorted(used)}


def _options(target: str, base: str, wheels: Wheels, config: Path) -> list[str]:
    """What the Dockerfile's steps may see of this machine: how pip and apt reach their archives, local wheels."""
    volumes = {config: "/etc/pip.conf", Path("/etc/apt"): "/etc/apt", Path("/etc/ssl/certs"): "/etc/ssl/certs"}
    volumes |= {folder: f"/wheels/{index}" for index, folder in enumerate(wheels.folders)}
    if "/foremoe-base:" not in base:  # another distribution's apt is not ours
        del volumes[Path("/etc/apt")]
    options = ["--target", target, "--tag", name_of(target), "--format", "oci", "--build-arg", f"BASE_IMAGE={base}"]
    options += ["--build-arg", f"LOCAL_WHEELS={' '.join(wheels.names())}"]
    for source, destination in volumes.items():
        options += ["--volume", f"{source}:{destination}:ro"]
    return options


def pip_config(listed: str, wheels: Wheels) -> str:
    """A pip.conf with this machine's indices (from `pip config list`) and the folders as the build sees them."""
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rsplit(".", 1)[-1]
        if name in ("index-url", "extra-index-url", "cert", "trusted-host", "timeout", "retries"):
            settings[name] = " ".join(value.strip("'\"").replace("\\n", " ").split())
    if wheels.find_links():
        settings["find-links"] = " ".join(wheels.find_links())
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
