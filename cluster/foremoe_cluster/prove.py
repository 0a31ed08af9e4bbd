"""Proof that the cluster leaves the machine as found, also after the worst: `prove-clean`.

Three rounds, each between two snapshots of the whole machine: up and down; `up` killed halfway; every
process of a running cluster killed. After a kill, everything is done by a copy of this package at
another path, as another checkout would.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from foremoe_cluster import cgroups, leftovers, processes, snapshot
from foremoe_cluster.api import Api, Manifest
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.lifecycle import PACKAGE
from foremoe_cluster.progress import note
from foremoe_cluster.settings import PAUSE_IMAGE, Settings
from foremoe_cluster.shell import wait_for

SETTLE_SECONDS = 10.0
"""The kernel takes network namespaces and cgroups apart in the background."""


def prove(settings: Settings, *, kill: bool) -> None:
    """Run all rounds (without `kill` the first only); raises ClusterError listing what was left."""
    with tempfile.TemporaryDirectory(prefix="foremoe-other-checkout-") as folder:
        other = Path(folder) / "cluster"
        shutil.copytree(PACKAGE.parent, other, ignore=shutil.ignore_patterns("__pycache__"))
        run_here, run_there = _runner(PACKAGE.parent, settings), _runner(other, settings)
        run_here("down")
        before, since = snapshot.take(since=snapshot.uptime()), snapshot.uptime()

        note("[bold]round 1[/]: up, down")
        run_here("up")
        _run_pods(settings)
        run_here("down")
        _check(before, since)
        if not kill:
            return

        note("[bold]round 2[/]: up killed halfway, up from another path, down")
        _kill_halfway(PACKAGE.parent)
        run_there("up")
        run_there("status")
        run_here("down")
        _check(before, since)

        note("[bold]round 3[/]: every process killed, up from another path, down")
        run_here("up")
        _run_pods(settings)
        _kill_all()
        run_there("up")
        run_here("down")
        _check(before, since)


def _runner(path: Path, settings: Settings) -> Callable[[str], None]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(path),
        "FOREMOE_CLUSTER_NODES": str(settings.nodes),
        "FOREMOE_CLUSTER_GPUS": str(settings.gpus),
    }

    def run(command: str) -> None:
        began = time.monotonic()
        argv = [sys.executable, "-m", PACKAGE.name, command]
        done = subprocess.run(argv, env=environment, text=True, capture_output=True, timeout=600)
        if done.returncode != 0:
            raise ClusterError(f"`{command}` failed:\n{done.stdout}{done.stderr}")
        note(f"  {command:<8} {time.monotonic() - began:6.1f} s")

    return run


def _run_pods(settings: Settings) -> None:
    """Pods on every node, with a volume, a GPU and addresses, so that there is something to leave behind."""
    labels = {"app": "prove-clean"}
    metadata = {"name": "prove-clean", "namespace": "default"}
    container = {
        "name": "pause",
        "image": PAUSE_IMAGE,
        "resources": {"limits": {"nvidia.com/gpu": 1}} if settings.gpus else {},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": metadata["name"]}}
    replicas = 2 * settings.nodes
    manifests: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata,
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": [claim]}},
            },
        },
    ]

    def ready() -> bool:
        found = api.get("/apis/apps/v1/namespaces/default/deployments/prove-clean")
        return found is not None and found.get("status", {}).get("readyReplicas", 0) == replicas

    with Api() as api:
        api.apply(manifests)
        began = time.monotonic()
        wait_for("pods ready", ready, seconds=60.0)
        note(f"  {replicas} pods {time.monotonic() - began:5.1f} s")


def _kill_halfway(path: Path) -> None:
    """SIGKILL to `up` as soon as the nodes' first containerd runs, in the middle of everything."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    process = subprocess.Popen([sys.executable, "-m", PACKAGE.name, "up"], env=environment, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60.0
    while "node1" not in processes.roles() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    note(f"  killed halfway; left: {leftovers.find().summary()}")


def _kill_all() -> None:
    pids = set(processes.find()) | cgroups.processes()
    processes.kill(sorted(pids))
    processes.wait_gone(pids, 10.0)
    note(f"  killed {len(pids)} processes; left: {leftovers.find().summary()}")


def _check(before: snapshot.Snapshot, since: float) -> None:
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        left = snapshot.difference(before, snapshot.take(since=since))
        if not left or time.monotonic() > end:
            break
        time.sleep(0.5)
    if left:
        raise ClusterError("the machine is not as it was before:\n" + "\n".join(left))
    counts = ", ".join(f"{len(facts)} {name}" for name, facts in before.categories.items() if facts)
    note(f"  [green]as found[/]: {counts}")
