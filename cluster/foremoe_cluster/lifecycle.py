"""Up, down and status: the order in which things start and end.

`up` is level-triggered: a healthy cluster with the wanted settings is left alone, everything else is
removed and made anew. So a failed or killed `up` is simply repeated. One lock per machine keeps two
runs apart; it belongs to the process and goes with it.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from foremoe_cluster import (
    buildah,
    cgroups,
    configs,
    leftovers,
    manifests,
    network,
    oci,
    packages,
    pki,
    processes,
    programs,
)
from foremoe_cluster.api import Api
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.progress import note, phase
from foremoe_cluster.settings import (
    BUILD,
    HOST_ADDRESS,
    KEPT,
    KUBECONFIG,
    LOGS,
    PAUSE_IMAGE,
    PKI,
    RUN,
    SHARED_VOLUMES,
    STATE,
    Node,
    Settings,
)
from foremoe_cluster.shell import log_of, start, tail, wait_for

RECORD = RUN / "settings.json"
PAUSE_ARCHIVE = RUN / "pause.tar"
PACKAGE = Path(__file__).resolve().parent
HOST_ROLES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns", "volumes")


HEALTH_SECONDS = 10.0
"""How long a cluster whose programs all run may be slow to answer before it is made anew: it may hold work."""

BUILD_LOCK = BUILD / "lock"


@contextmanager
def machine_lock(path: Path = STATE / "lock") -> Iterator[None]:
    """Held by whoever changes the cluster, or builds images; waits for another run to end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("another run is at work on this machine's cluster, waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def up(settings: Settings) -> None:
    """Bring the cluster up: both nodes Ready, DNS answering, stand-in GPUs allocatable."""
    _require_root()
    with machine_lock():
        packages.ensure(packages.RUNNING)
        bin_ = programs.binaries()
        if healthy(settings, bin_):
            note("the cluster is up already")
            return
        _remove_leftovers()
        began = time.monotonic()
        try:
            _start(settings, bin_)
        except BaseException:
            note(
                "[red]the cluster did not come up[/]; the logs stay in " + str(LOGS) + " until the next `up` or `down`"
            )
            raise
        note(f"cluster up in {time.monotonic() - began:.1f} s; KUBECONFIG={KUBECONFIG}")


def down(*, purge: bool) -> None:
    """Remove the cluster, and with `purge` also its images and the image builder's storage."""
    _require_root()
    with machine_lock():
        _remove_leftovers()
        _release_builder()
        if purge:
            with phase("images and build storage"):
                for folder in KEPT:
                    shutil.rmtree(folder, ignore_errors=True)
    if not any(path.name != "lock" for path in STATE.iterdir()):
        shutil.rmtree(STATE)


def healthy(settings: Settings, bin_: Path) -> bool:
    """Whether exactly this cluster runs, all its programs are alive and all nodes Ready."""
    if not RECORD.exists() or json.loads(RECORD.read_text()) != _record(settings, bin_):
        return False
    wanted = {*HOST_ROLES, *(node.name for node in settings.all_nodes())}
    if not wanted <= processes.roles().keys():
        return False
    end = time.monotonic() + HEALTH_SECONDS
    with Api() as api:
        while not (api.ready() and len(ready_nodes(api)) == settings.nodes):
            if time.monotonic() > end:
                return False
            time.sleep(0.5)
    return True


def node_count() -> int | None:
    """Of the cluster that runs, None where none does."""
    if not RECORD.exists():
        return None
    return int(json.loads(RECORD.read_text())["nodes"])


def ready_nodes(api: Api) -> list[str]:
    """Names of the nodes that are Ready."""
    return [
        node["metadata"]["name"]
        for node in api.items("/api/v1/nodes")
        if any(entry["type"] == "Ready" and entry["status"] == "True" for entry in node["status"].get("conditions", []))
    ]


def allocatable_gpus(api: Api) -> int:
    """Of all nodes together."""
    nodes = api.items("/api/v1/nodes")
    return sum(int(node["status"].get("allocatable", {}).get("nvidia.com/gpu", 0)) for node in nodes)


def _start(settings: Settings, bin_: Path) -> None:
    nodes = settings.all_nodes()
    for folder in (RUN, LOGS, SHARED_VOLUMES):
        folder.mkdir(parents=True, exist_ok=True)
    leftovers.make_mount_points()
    with phase("network, keys, configuration"):
        network.create_bridge()
        pki.create(PKI, nodes)
        shutil.copy(PKI / "admin.kubeconfig", KUBECONFIG)
        (RUN / "Corefile").write_text(configs.corefile())
        layer = oci.layer_of({"pause": bin_ / "pause"})
        config = oci.image_config([layer], ["/pause"])
        oci.write_archive(PAUSE_ARCHIVE, reference=PAUSE_IMAGE, config=config, layers=[layer])
    with phase("etcd and API server"):
        started = {"etcd": start("etcd", configs.etcd(bin_))}
        started["kube-apiserver"] = start("kube-apiserver", configs.apiserver(bin_))
        for node in nodes:  # containerd needs no API server, so the nodes' first second is free
            started[node.name] = start_node(node, settings, bin_)
        with Api() as api:
            _wait("API server", api.ready, started, "kube-apiserver", seconds=90)
            started["kube-controller-manager"] = start("kube-controller-manager", configs.controller_manager(bin_))
            started["kube-scheduler"] = start("kube-scheduler", configs.scheduler(bin_))
            api.apply(manifests.all_manifests())
    with phase("DNS and volumes"):
        started["coredns"] = start("coredns", configs.coredns(bin_))
        started["volumes"] = _start_own("volumes", "foremoe_cluster.volumes")
        _wait("CoreDNS", _dns_ready, started, "coredns", seconds=30)
    with phase(f"{settings.nodes} nodes Ready"), Api() as api:
        _wait("nodes Ready", lambda: len(ready_nodes(api)) == settings.nodes, started, "node1.kubelet", seconds=90)
        _wait("default service account", lambda: _account(api), started, "kube-controller-manager", seconds=60)
    with phase(f"{settings.gpus * settings.nodes} stand-in GPUs"), Api() as api:
        total = settings.gpus * settings.nodes
        _wait("GPUs", lambda: allocatable_gpus(api) == total, started, "node1.device-plugin", seconds=60)
    RECORD.write_text(json.dumps(_record(settings, bin_)))


def start_node(node: Node, settings: Settings, bin_: Path) -> subprocess.Popen[bytes]:
    """Start a node: one process tree in namespaces of its own, ended as a whole by killing its first process."""
    for name in ("kubelet", "pods", "containers", "sysctl", "cni", "run", "addresses"):
        (node.folder / name).mkdir(parents=True, exist_ok=True)
    (LOGS / node.name).mkdir(parents=True, exist_ok=True)
    node.images.mkdir(parents=True, exist_ok=True)
    (node.folder / "kubelet.json").write_text(configs.kubelet(node))
    (node.folder / "kube-proxy.json").write_text(configs.kube_proxy(node))
    (node.folder / "containerd.toml").write_text(configs.containerd(node, bin_))
    (node.folder / "cni" / "10-pods.conflist").write_text(configs.cni(node))
    cgroups.create(node)
    plugin = f"{sys.executable} -m foremoe_cluster.deviceplugin --node {node.name} --devices {settings.gpus}"
    environment = {
        "NODE": node.name,
        "ADDRESS": node.address,
        "GATEWAY": HOST_ADDRESS,
        "NODE_DIR": str(node.folder),
        "NODE_LOGS": str(LOGS / node.name),
        "NODE_ROUTES": " ".join(f"{subnet}={via}" for subnet, via in configs.routes(node, settings.all_nodes())),
        "BIN": str(bin_),
        "PAUSE_ARCHIVE": str(PAUSE_ARCHIVE),
        "PAUSE_IMAGE": PAUSE_IMAGE,
        "KUBELET_ARGS": " ".join(configs.kubelet_arguments(node, configs.gpu_labels(node, settings.gpus))),
        "DEVICE_PLUGIN": plugin if settings.gpus else "",
        "PYTHONPATH": str(PACKAGE.parent),
    }
    namespaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    argv: list[str | Path] = [
        "unshare",
        *namespaces,
        "--propagation",
        "private",
        "bash",
        PACKAGE / "files" / "node-init.sh",
    ]
    process = start(node.name, argv, env=environment)
    own = os.readlink("/proc/self/ns/net")
    wait_for(
        f"{node.name}: network namespace", lambda: _namespace(process.pid) not in ("", own), seconds=10, interval=0.01
    )
    network.plug_in(node, process.pid)
    return process


def _start_own(role: str, module: str) -> subprocess.Popen[bytes]:
    return start(role, [sys.executable, "-m", module], env={"PYTHONPATH": str(PACKAGE.parent)})


def _wait(
    what: str, probe: Callable[[], bool], started: dict[str, subprocess.Popen[bytes]], log: str, *, seconds: float
) -> None:
    """Wait for the probe, but no longer than all programs run: a dead one is the answer."""

    def check() -> bool:
        for role, process in started.items():
            if process.poll() is not None:
                raise ClusterError(f"{role} ended with code {process.returncode}:\n{tail(log_of(role))}")
        return probe()

    wait_for(what, check, seconds=seconds, hint=lambda: tail(log_of(log.replace(".", "/", 1))))


def _dns_ready() -> bool:
    try:
        return httpx.get(f"http://{configs.DNS_READY}/ready", timeout=1.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _account(api: Api) -> bool:
    return api.get("/api/v1/namespaces/default/serviceaccounts/default") is not None


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _remove_leftovers() -> None:
    left = leftovers.find()
    if left:
        with phase(f"removing {left.summary()}"):
            leftovers.remove()


def _release_builder() -> None:
    """What a killed image build left goes too; one that is at work is left alone."""
    if not BUILD_LOCK.exists():
        return
    with BUILD_LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("an image build is at work; it goes on")
        else:
            buildah.release()


def _record(settings: Settings, bin_: Path) -> dict[str, object]:
    return {**settings.to_dict(), "programs": str(bin_)}


def _require_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError("the cluster needs root: it makes namespaces, cgroups and network links")
