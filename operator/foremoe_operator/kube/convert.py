"""From objects as the API server sends them to the core's data; what is missing or odd becomes a default, not an error.

Only what the core uses is kept, so that the cache of a thousand pods stays small.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import ValidationError

from foremoe_operator.api.constants import LABEL_ATTEMPT, LABEL_JOB, LABEL_ROLE, LABEL_WORKER_INDEX, Role
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.status import ForeMoEJobStatus
from foremoe_operator.core.model import Container, Job, Manifest, Pod

_log = logging.getLogger(__name__)
Key = tuple[str, str]
"""Namespace and name of a job."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class StoredJob:
    """A job with what is needed to write its status and to post events on it."""

    job: Job
    resource_version: str
    identity: Manifest
    """apiVersion, kind and metadata, as a reference to the object."""
    raw_status: Manifest


def key_of_child(raw: Mapping[str, object]) -> Key:
    """The job a labelled object belongs to."""
    metadata = _map(raw, "metadata")
    return str(metadata.get("namespace", "")), str(_map(metadata, "labels").get(LABEL_JOB, ""))


def job_from(raw: Mapping[str, object]) -> StoredJob:
    """A ForeMoEJob; a spec or status that does not parse leaves `problems`, never an exception."""
    metadata = _map(raw, "metadata")
    spec: ForeMoEJobSpec | None = None
    problems: tuple[str, ...] = ()
    try:
        spec = ForeMoEJobSpec.model_validate(_map(raw, "spec"))
    except ValidationError as error:
        problems = tuple(
            f"spec.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)
        )
    status, readable = ForeMoEJobStatus(), True
    try:
        status = ForeMoEJobStatus.model_validate(_map(raw, "status"))
    except ValidationError as error:
        readable = False
        _log.warning("%s/%s is left alone: %s", metadata.get("namespace"), metadata.get("name"), error)
    job = Job(
        name=str(metadata.get("name", "")),
        namespace=str(metadata.get("namespace", "")),
        uid=str(metadata.get("uid", "")),
        generation=_int(metadata.get("generation")),
        created=_time(metadata.get("creationTimestamp")) or _EPOCH,
        spec=spec,
        problems=problems,
        readable=readable,
        status=status,
        deleting=metadata.get("deletionTimestamp") is not None,
    )
    kept = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion") if key in metadata}
    identity: Manifest = {"apiVersion": raw.get("apiVersion"), "kind": raw.get("kind"), "metadata": kept}
    return StoredJob(
        job=job,
        resource_version=str(metadata.get("resourceVersion", "")),
        identity=identity,
        raw_status=dict(_map(raw, "status")),
    )


def pod_from(raw: Mapping[str, object]) -> Pod:
    """A pod of a job."""
    metadata, spec, status = _map(raw, "metadata"), _map(raw, "spec"), _map(raw, "status")
    labels = _map(metadata, "labels")
    conditions = {str(each.get("type")): each for each in _list(status, "conditions")}
    scheduled = conditions.get("PodScheduled", {})
    refused = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    return Pod(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        owner_uid=owner_uid(raw),
        role=Role.HEAD if labels.get(LABEL_ROLE) == Role.HEAD else Role.WORKER,
        index=_int(labels.get(LABEL_WORKER_INDEX)),
        attempt=_int(labels.get(LABEL_ATTEMPT)),
        phase=str(status.get("phase", "Pending")),
        created=_time(metadata.get("creationTimestamp")) or _EPOCH,
        node=str(spec["nodeName"]) if spec.get("nodeName") else None,
        ip=str(status["podIP"]) if status.get("podIP") else None,
        ready=conditions.get("Ready", {}).get("status") == "True",
        unschedulable=str(scheduled.get("message", "")) if refused else "",
        sandbox_ready=conditions.get("PodReadyToStartContainers", {}).get("status") == "True",
        reason=str(status.get("reason", "")),
        message=str(status.get("message", "")),
        container=_container(status),
        deleting=_time(metadata.get("deletionTimestamp")),
    )


def owner_uid(raw: Mapping[str, object]) -> str:
    """UID of the controller of an object, empty if it has none."""
    owners = _list(_map(raw, "metadata"), "ownerReferences")
    return next((str(each.get("uid", "")) for each in owners if each.get("controller") is True), "")


def _container(status: Mapping[str, object]) -> Container:
    statuses = _list(status, "containerStatuses")
    if not statuses:
        return Container()
    state = _map(statuses[0], "state")
    ended, waiting = _map(state, "terminated"), _map(state, "waiting")
    now = ended or waiting
    return Container(
        started="running" in state or bool(ended),
        reason=str(now.get("reason", "")),
        message=str(now.get("message", "")),
        exit_code=_int(ended.get("exitCode")) if ended else None,
        finished=_time(ended.get("finishedAt")),
    )


def _map(raw: Mapping[str, object], key: str) -> Mapping[str, object]:
    found = raw.get(key)
    return found if isinstance(found, Mapping) else {}


def _list(raw: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    found = raw.get(key)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _int(value: object) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]  # anything else raises
    except (TypeError, ValueError):
        return 0


def _time(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
