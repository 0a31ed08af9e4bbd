"""How long the operator needs from `kubectl apply` to all pods of a job, and how much memory it holds.

Needs a cluster in which the operator runs (`make cluster-up images`, then helm), or starts one from this tree with
`--local-operator`. The job's image need not exist: what is measured ends when the pods do exist.

    python benchmarks/operator_creation.py --workers 2 --workers 64 --repeat 5 --local-operator

Prints, for each number of workers, least, median and largest seconds from the API server's answer to the job until it
lists all pods, measured by the client at 5 ms steps.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from foremoe_operator.kube.client import Call, KubeClient

_JOBS = "/apis/foremoe.io/v1alpha1/namespaces/{}/foremoejobs"


def _job(name: str, workers: int) -> dict[str, object]:
    spec = {
        "image": "localhost/not-needed:none",
        "imagePullPolicy": "Never",
        "model": {"path": "/data/model"},
        "data": {"trainFiles": ["/data/train.parquet"]},
        "totalSteps": 1,
        "workers": {"replicas": workers, "gpusPerWorker": 1},
        "volumes": [{"name": "data", "claimName": "none", "mountPath": "/data"}],
        "checkpoint": {"path": "/data/checkpoints"},
        "terminationGracePeriodSeconds": 0,
    }
    return {"apiVersion": "foremoe.io/v1alpha1", "kind": "ForeMoEJob", "metadata": {"name": name}, "spec": spec}


def _seconds_to_all_pods(client: KubeClient, namespace: str, workers: int) -> float:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    path = _JOBS.format(namespace)
    pods = Call(
        method="GET", path=f"/api/v1/namespaces/{namespace}/pods", query={"labelSelector": f"foremoe.io/job={name}"}
    )
    client.request_blocking(Call(method="POST", path=path, body=_job(name, workers)))
    begun = time.monotonic()
    while len(client.request_blocking(pods)["items"]) < workers + 1:  # type: ignore[arg-type]
        if time.monotonic() - begun > 60:
            raise SystemExit("no pods after 60 s: does an operator run in this cluster?")
        time.sleep(0.005)
    seconds = time.monotonic() - begun
    client.request_blocking(Call(method="DELETE", path=f"{path}/{name}"))
    while client.request_blocking(pods)["items"]:
        time.sleep(0.1)
    return seconds


@contextmanager
def _operator(start: bool, kubeconfig: str) -> Iterator[int | None]:
    """Process id of an operator started for the measurement, None if there is one already."""
    if not start:
        yield None
        return
    ports = {"FOREMOE_OPERATOR_HEALTH_PORT": "28081", "FOREMOE_OPERATOR_METRICS_PORT": "28091"}
    environment = {**os.environ, **ports, "KUBECONFIG": kubeconfig, "FOREMOE_OPERATOR_LISTEN_HOST": "127.0.0.1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-m", "foremoe_operator"], env=environment, stdout=log, stderr=log)
        try:
            time.sleep(5)
            yield process.pid
        finally:
            process.terminate()
            process.wait(20)


def _resident_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main(
    workers: Annotated[
        list[int] | None, typer.Option(help="Worker pods of the job; may be given several times.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Jobs for each number of workers.")] = 5,
    local_operator: Annotated[bool, typer.Option(help="Start an operator from this tree.")] = False,
    kubeconfig: Annotated[str, typer.Option(envvar="KUBECONFIG")] = "~/.kube/config",
) -> None:
    """Measure the operator's part of a job's start."""
    path = str(Path(kubeconfig).expanduser())
    configuration = Configuration()
    load_kube_config(path, client_configuration=configuration)
    client = KubeClient(configuration)
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    client.request_blocking(Call(method="POST", path="/api/v1/namespaces", body=body))
    try:
        with _operator(local_operator, path) as pid:
            if pid is not None:
                print(f"operator idle: {_resident_megabytes(pid):.0f} MB resident")
            for count in workers or [2]:
                times = sorted(_seconds_to_all_pods(client, namespace, count) for _ in range(repeat))
                spread = f"min {times[0]:.2f} s, median {statistics.median(times):.2f} s, max {times[-1]:.2f} s"
                print(f"{count} workers: applied -> all {count + 1} pods exist: {spread} ({repeat} jobs)")
            if pid is not None:
                print(f"operator afterwards: {_resident_megabytes(pid):.0f} MB resident")
    finally:
        client.request_blocking(Call(method="DELETE", path=f"/api/v1/namespaces/{namespace}"))


if __name__ == "__main__":
    typer.run(main)
