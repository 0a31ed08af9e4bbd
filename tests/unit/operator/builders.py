"""Jobs, pods and observations for tests, each with as little said as possible."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from foremoe_operator.api.constants import Role, Stage
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.progress import Progress
from foremoe_operator.api.status import ForeMoEJobStatus
from foremoe_operator.core.manifests import head_name, worker_name
from foremoe_operator.core.model import Container, Create, Decision, Job, Limits, Observed, Pod
from foremoe_operator.core.reconcile import reconcile

NOW = datetime(2026, 7, 1, 12, 0, 0, tzinfo=UTC)
UID = "uid-of-job"
LIMITS = Limits()

_MANIFEST: dict[str, Any] = {
    "apiVersion": "foremoe.io/v1alpha1",
    "kind": "ForeMoEJob",
    "metadata": {"name": "tiny"},
    "spec": {
        "image": "localhost/foremoe-worker:test",
        "model": {"path": "/data/model"},
        "data": {"trainFiles": ["/data/train.parquet"]},
        "totalSteps": 3,
        "workers": {"replicas": 2, "gpusPerWorker": 1},
        "parallelism": {"expert": 2},
        "volumes": [{"name": "data", "claimName": "shared", "mountPath": "/data"}],
        "checkpoint": {"path": "/data/checkpoints"},
    },
}


def manifest(name: str = "tiny", **spec: Any) -> dict[str, Any]:
    """A valid manifest with some fields of the spec replaced."""
    made = copy.deepcopy(_MANIFEST)
    made["metadata"]["name"] = name
    made["spec"].update(spec)
    return made


def job(*, status: ForeMoEJobStatus | None = None, **spec: Any) -> Job:
    return Job(
        name="tiny",
        namespace="ns",
        uid=UID,
        generation=1,
        created=NOW,
        spec=ForeMoEJobSpec.model_validate(manifest(**spec)["spec"]),
        status=status or ForeMoEJobStatus(),
    )


def head(**fields: Any) -> Pod:
    return replace(Pod(name=head_name("tiny"), uid="head", owner_uid=UID, role=Role.HEAD, created=NOW), **fields)


def worker(index: int, **fields: Any) -> Pod:
    name = worker_name("tiny", index)
    pod = Pod(name=name, uid=f"w{index}", owner_uid=UID, role=Role.WORKER, index=index, created=NOW)
    return replace(pod, **fields)


def running(pod: Pod, **fields: Any) -> Pod:
    """The pod, with a node, an address, and its container running."""
    fields = {"phase": "Running", "node": "node1", "ip": "10.0.0.1", "ready": True, "sandbox_ready": True} | fields
    return replace(pod, container=Container(started=True), **fields)


def ended(pod: Pod, code: int, *, reason: str = "", message: str = "", at: datetime = NOW, **fields: Any) -> Pod:
    container = Container(
        started=True,
        reason=reason or ("Completed" if code == 0 else "Error"),
        message=message,
        exit_code=code,
        finished=at,
    )
    phase = "Succeeded" if code == 0 else "Failed"
    return replace(running(pod), phase=phase, ready=False, container=container, **fields)


def all_running() -> tuple[Pod, ...]:
    return (running(head()), running(worker(0)), running(worker(1)))


def progress(stage: Stage = Stage.ROLLOUT, **fields: Any) -> Progress:
    return Progress(stage=stage, workers_joined=2, total_steps=3, **fields)


CHILDREN = frozenset({("Service", "tiny-ray"), ("ConfigMap", "tiny-boot-1")})


def decide(subject: Job, *pods: Pod, now: datetime = NOW, **observed: Any) -> Decision:
    return reconcile(subject, Observed(pods=pods, children=CHILDREN, **observed), now, LIMITS)


def stored(subject: Job, decision: Decision) -> Job:
    """The job after the decision's status was written."""
    assert decision.status is not None
    return replace(subject, status=ForeMoEJobStatus.model_validate(decision.status.dump()))


def running_job(**spec: Any) -> Job:
    """A job whose ranks have all joined."""
    subject = job(**spec)
    return stored(subject, decide(subject, *all_running(), progress=progress(), head_answered=True))


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def created(decision: Decision) -> list[str]:
    """Kinds and names of what the decision creates."""
    manifests = [each.manifest for each in decision.actions if isinstance(each, Create)]
    return [f"{each['kind']}/{each['metadata']['name']}" for each in manifests]  # type: ignore[index]
