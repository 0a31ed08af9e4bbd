"""The objects of a job, as pure functions of job and attempt.

Always: names are fixed, so that a repeated create meets itself; every object carries all labels and an owner reference,
so that deleting the job deletes it; pods pass the *restricted* Pod Security level; only workers ask for GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from foremoe_operator.api import constants as c
from foremoe_operator.api.boot import BootConfig
from foremoe_operator.api.job import ForeMoEJobSpec, Head, Workers
from foremoe_operator.core.model import Job, Manifest

CONTAINER: Final = "foremoe"
_USER: Final = 1000
_CPU_REQUEST: Final = "100m"
_SHARED_MEMORY: Final = "/dev/shm"
# The head's CPU and memory would be missing beside the GPUs. Preferred only: some clusters have no other nodes.
_OFF_GPU_NODES: Final[Manifest] = {
    "weight": 50,
    "preference": {"matchExpressions": [{"key": "nvidia.com/gpu.present", "operator": "DoesNotExist"}]},
}


def service_name(job: str) -> str:
    """Name of the headless service over all pods of a job."""
    return f"{job}-ray"


def boot_name(job: str, attempt: int) -> str:
    """Name of the boot ConfigMap of an attempt; it is immutable, so another attempt has another name."""
    return f"{job}-boot-{attempt}"


def head_name(job: str) -> str:
    """Name and host name of the head pod."""
    return f"{job}-head-0"


def worker_name(job: str, index: int) -> str:
    """Name and host name of a worker pod."""
    return f"{job}-worker-{index}"


def head_host(job: str) -> str:
    """Name under which the pods of a job find its head, relative to their namespace."""
    return f"{head_name(job)}.{service_name(job)}"


def build_service(job: Job, attempt: int) -> Manifest:
    """Headless service: gives every pod a name, also before it is ready, because ranks meet while starting."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, service_name(job.name), attempt, component="network"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {c.LABEL_JOB: job.name},
            "ports": [
                {"name": "gcs", "port": c.PORT_RAY_GCS},
                {"name": "dashboard", "port": c.PORT_RAY_DASHBOARD},
                {"name": "agent", "port": c.PORT_AGENT},
            ],
        },
    }


def build_boot_config_map(job: Job, spec: ForeMoEJobSpec, attempt: int) -> Manifest:
    """What the agents read when they start."""
    boot = BootConfig(job=job.name, namespace=job.namespace, attempt=attempt, head_host=head_host(job.name), spec=spec)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, boot_name(job.name, attempt), attempt, component="boot"),
        "immutable": True,
        "data": {c.BOOT_FILE: json.dumps(boot.dump(), indent=1, sort_keys=True)},
    }


def build_head_pod(job: Job, spec: ForeMoEJobSpec, attempt: int) -> Manifest:
    """The pod of the Ray head and the driver."""
    return _pod(job, spec, attempt, role=c.Role.HEAD, name=head_name(job.name), group=spec.head, index=None)


def build_worker_pod(job: Job, spec: ForeMoEJobSpec, attempt: int, index: int) -> Manifest:
    """Worker pod number `index`."""
    name = worker_name(job.name, index)
    return _pod(job, spec, attempt, role=c.Role.WORKER, name=name, group=spec.workers, index=index)


Part = tuple[str, str, Callable[[], Manifest]]
"""Kind and name of an object, and how to build it."""


def parts(job: Job, spec: ForeMoEJobSpec, attempt: int) -> Iterator[Part]:
    """Every object of an attempt, not yet built; what pods refer to comes before them."""
    yield "Service", service_name(job.name), partial(build_service, job, attempt)
    yield "ConfigMap", boot_name(job.name, attempt), partial(build_boot_config_map, job, spec, attempt)
    yield "Pod", head_name(job.name), partial(build_head_pod, job, spec, attempt)
    for index in range(spec.workers.replicas):
        yield "Pod", worker_name(job.name, index), partial(build_worker_pod, job, spec, attempt, index)


def _metadata(job: Job, name: str, attempt: int, *, component: str) -> Manifest:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {
            c.LABEL_NAME: "foremoe-job",
            c.LABEL_INSTANCE: job.name,
            c.LABEL_MANAGED_BY: c.FIELD_MANAGER,
            c.LABEL_COMPONENT: component,
            c.LABEL_PART_OF: "foremoe",
            c.LABEL_JOB: job.name,
            c.LABEL_ATTEMPT: str(attempt),
        },
        "ownerReferences": [
            {
                "apiVersion": c.API_VERSION,
                "kind": c.KIND_JOB,
                "name": job.name,
                "uid": job.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def _pod(
    job: Job,
    spec: ForeMoEJobSpec,
    attempt: int,
    *,
    role: c.Role,
    name: str,
    group: Head | Workers,
    index: int | None,
) -> Manifest:
    metadata = _metadata(job, name, attempt, component=role)
    labels = metadata["labels"]
    assert isinstance(labels, dict)
    labels[c.LABEL_ROLE] = str(role)
    if index is not None:
        labels[c.LABEL_WORKER_INDEX] = str(index)
    body: Manifest = {
        "restartPolicy": "Never",
        "hostname": name,
        "subdomain": service_name(job.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.termination_grace_period_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            # Walking a large claim to change owners can take longer than the start-up deadline.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(spec, role=role, group=group, index=index)],
        "volumes": _volumes(job, spec, attempt),
    }
    if group.node_selector:
        body["nodeSelector"] = dict(group.node_selector)
    if role is c.Role.WORKER:
        body["topologySpreadConstraints"] = [_spread(job)]
        body["tolerations"] = [{"key": c.RESOURCE_GPU, "operator": "Exists", "effect": "NoSchedule"}]
    else:
        body["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_OFF_GPU_NODES]}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def _spread(job: Job) -> Manifest:
    """Workers go to different nodes while there are some: a node's NICs and host memory are shared by its pods."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {c.LABEL_JOB: job.name, c.LABEL_ROLE: str(c.Role.WORKER)}},
    }


def _container(spec: ForeMoEJobSpec, *, role: c.Role, group: Head | Workers, index: int | None) -> Manifest:
    return {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": str(spec.image_pull_policy),
        "command": ["python", "-m", "foremoe.agent"],
        "workingDir": c.SCRATCH_DIRECTORY,
        "env": [*_own_env(role, index), *({"name": each.name, "value": each.value} for each in spec.env)],
        "ports": [{"name": "agent", "containerPort": c.PORT_AGENT}],
        "resources": _resources(group),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePath": c.TERMINATION_FILE,
        # The agent writes its own report; if it could not, the kubelet takes the end of the log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "scratch", "mountPath": c.SCRATCH_DIRECTORY},
            {"name": "shm", "mountPath": _SHARED_MEMORY},
            {"name": "boot", "mountPath": c.BOOT_DIRECTORY, "readOnly": True},
            *({"name": each.name, "mountPath": each.mount_path, "readOnly": each.read_only} for each in spec.volumes),
        ],
        "readinessProbe": _probe(period=2, failures=5),
        # Ten minutes: a step that starves the agent of CPU must not end a run (KubeRay's reasoning and value).
        "livenessProbe": {**_probe(period=5, failures=120), "initialDelaySeconds": 30},
    }


def _own_env(role: c.Role, index: int | None) -> Iterator[Manifest]:
    yield {"name": c.ENV_ROLE, "value": str(role)}
    if index is not None:
        yield {"name": c.ENV_WORKER_INDEX, "value": str(index)}
    yield {"name": c.ENV_BOOT_FILE, "value": f"{c.BOOT_DIRECTORY}/{c.BOOT_FILE}"}
    yield {"name": c.ENV_TERMINATION_FILE, "value": c.TERMINATION_FILE}
    yield {"name": c.ENV_NODE_NAME, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    yield {"name": c.ENV_POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    # The user id has no entry in /etc/passwd, and torch asks getpass for a name.
    yield {"name": "HOME", "value": c.SCRATCH_DIRECTORY}
    yield {"name": "USER", "value": "foremoe"}
    yield {"name": "PYTHONUNBUFFERED", "value": "1"}


def _resources(group: Head | Workers) -> Manifest:
    requests: Manifest = {"cpu": group.resources.cpu or _CPU_REQUEST}
    limits: Manifest = {}
    if group.resources.memory:
        requests["memory"] = limits["memory"] = group.resources.memory
    if isinstance(group, Workers):
        limits[c.RESOURCE_GPU] = str(group.gpus_per_worker)
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _probe(*, period: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": c.PATH_HEALTH, "port": c.PORT_AGENT},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(job: Job, spec: ForeMoEJobSpec, attempt: int) -> list[Manifest]:
    claims: list[Manifest] = [
        {"name": each.name, "persistentVolumeClaim": {"claimName": each.claim_name, "readOnly": each.read_only}}
        for each in spec.volumes
    ]
    return [
        {"name": "tmp", "emptyDir": {}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "boot", "configMap": {"name": boot_name(job.name, attempt)}},
        *claims,
    ]
