"""What a job's pods say about how far it is: counts, what it waits for, and which pod to look at first.

Nothing here decides that a job failed; a pod that cannot start is reported with its reason and may still recover.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from foremoe_operator.api.constants import ConditionType, Reason, Role, Stage
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.status import WorkerCounts
from foremoe_operator.core.conditions import Finding
from foremoe_operator.core.manifests import head_name, worker_name
from foremoe_operator.core.model import Job, Limits, Observed, Pod

_IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
     "RegistryUnavailable", "SignatureValidationFailed"}
)  # fmt: skip
_CONFIG_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError",
     "PreStartHookError", "PostStartHookError"}
)  # fmt: skip
_VOLUME_WORDS: Final = ("persistentvolumeclaim", "persistent volume", "volume node affinity", "volume binding")
JOINED_STAGES: Final = frozenset(Stage) - {Stage.BOOTING, Stage.WAITING_FOR_WORKERS}


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The pods of this job and attempt, told apart from leftovers of an earlier job of the same name."""

    head: Pod | None
    workers: dict[int, Pod]
    foreign: tuple[Pod, ...]
    desired: int

    @classmethod
    def of(cls, job: Job, spec: ForeMoEJobSpec, observed: Observed) -> Pods:
        """Sort the observed pods by what they are."""
        ours = [pod for pod in observed.pods if pod.owner_uid == job.uid]
        head = next((pod for pod in ours if pod.name == head_name(job.name)), None)
        workers = {
            pod.index: pod for pod in ours if pod.role is Role.WORKER and pod.name == worker_name(job.name, pod.index)
        }
        foreign = tuple(pod for pod in observed.pods if pod.owner_uid != job.uid)
        return cls(head=head, workers=workers, foreign=foreign, desired=spec.workers.replicas)

    @property
    def present(self) -> list[Pod]:
        """Head first, then workers by index: the order in which people should look."""
        return [pod for pod in (self.head, *(self.workers[index] for index in sorted(self.workers))) if pod is not None]

    @property
    def missing_workers(self) -> list[int]:
        """Indices of workers that do not exist."""
        return [index for index in range(self.desired) if index not in self.workers]

    @property
    def complete(self) -> bool:
        """Whether every pod of the attempt exists."""
        return self.head is not None and not self.missing_workers

    def counts(self) -> WorkerCounts:
        """For `status.workers`."""
        pods = list(self.workers.values())
        return WorkerCounts(
            desired=self.desired,
            scheduled=sum(pod.node is not None for pod in pods),
            ready=sum(pod.ready and not pod.ended for pod in pods),
            failed=sum(has_failed(pod) for pod in pods),
        )


def has_failed(pod: Pod) -> bool:
    """Whether a pod ended with an error of its own."""
    return pod.phase == "Failed" or pod.container.exit_code not in (None, 0)


def scheduled_finding(pods: Pods, observed: Observed) -> Finding:
    """The PodsScheduled condition."""
    kind = ConditionType.PODS_SCHEDULED
    if observed.refusals and not pods.complete:
        first = observed.refusals[0]
        return Finding(
            type=kind,
            status="False",
            reason=Reason.CREATE_FAILED,
            message=f"{first.kind} {first.name}: {first.message}",
        )
    if not pods.complete:
        message = f"{len(pods.workers)} of {pods.desired} worker pods exist"
        if pods.foreign:
            message = f"waiting for pod {pods.foreign[0].name} of an earlier job of this name to go"
        return Finding(type=kind, status="False", reason=Reason.CREATING, message=message)
    unscheduled = [pod for pod in pods.present if pod.node is None and not pod.ended]
    refused = [pod for pod in unscheduled if pod.unschedulable]
    if refused:
        volume = any(word in refused[0].unschedulable.lower() for word in _VOLUME_WORDS)
        hint = _remedy(Reason.VOLUME_NOT_READY) if volume else ""
        message = f"{_first_of(refused)}: {refused[0].unschedulable}{hint}"
        return Finding(type=kind, status="False", reason=Reason.UNSCHEDULABLE, message=message)
    if unscheduled:
        return Finding(type=kind, status="False", reason=Reason.SCHEDULING, message=_first_of(unscheduled))
    return Finding(
        type=kind, status="True", reason=Reason.ALL_SCHEDULED, message=f"head and {pods.desired} workers have nodes"
    )


def blocked_finding(pods: Pods, *, now: datetime, limits: Limits) -> Finding | None:
    """A reason why some pod does not get to run, as a Ready condition; None if there is none."""

    def overdue(pod: Pod) -> bool:
        waiting = pod.node is not None and not pod.ended and not pod.sandbox_ready and not pod.container.started
        return waiting and (now - pod.created).total_seconds() >= limits.volume_seconds

    def wants_volume(pod: Pod) -> bool:
        return any(word in pod.unschedulable.lower() for word in _VOLUME_WORDS)

    checks: tuple[tuple[Reason, Callable[[Pod], bool]], ...] = (
        (Reason.IMAGE_PULL_BACK_OFF, lambda pod: pod.container.reason in _IMAGE_REASONS),
        (Reason.CONTAINER_CONFIG_ERROR, lambda pod: not pod.ended and pod.container.reason in _CONFIG_REASONS),
        (Reason.VOLUME_NOT_READY, lambda pod: wants_volume(pod) or overdue(pod)),
    )
    for reason, applies in checks:
        hit = [pod for pod in pods.present if applies(pod)]
        if hit:
            said = hit[0].container.message or hit[0].unschedulable or hit[0].container.reason or "not started"
            return Finding(
                type=ConditionType.READY,
                status="False",
                reason=reason,
                message=f"{_first_of(hit)}: {said}{_remedy(reason)}",
            )
    return None


def ready_finding(pods: Pods, observed: Observed, *, joined: bool, silent: bool) -> Finding:
    """The Ready condition of a job none of whose pods is blocked."""
    kind = ConditionType.READY
    if not pods.complete or any(pod.node is None for pod in pods.present):
        return Finding(type=kind, status="False", reason=Reason.WAITING_FOR_PODS, message="not all pods have a node")
    if silent:
        message = "the head pod runs but its agent does not answer"
        return Finding(type=kind, status="False", reason=Reason.HEAD_UNREACHABLE, message=message)
    head = pods.head
    if head is None or not head.container.started:
        return Finding(type=kind, status="False", reason=Reason.WAITING_FOR_HEAD, message="the head is starting")
    if joined:
        message = f"all {pods.desired} workers have joined the head"
        return Finding(type=kind, status="True", reason=Reason.ALL_RANKS_JOINED, message=message)
    if observed.progress is None:
        return Finding(type=kind, status="False", reason=Reason.WAITING_FOR_HEAD, message="the head is starting")
    message = f"{observed.progress.workers_joined} of {pods.desired} workers have joined the head"
    late = [pod for pod in pods.workers.values() if not pod.ready]
    return Finding(
        type=kind,
        status="False",
        reason=Reason.WAITING_FOR_WORKERS,
        message=f"{message}; waiting for {_first_of(late)}" if late else message,
    )


def _first_of(pods: Sequence[Pod]) -> str:
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    return f"pod {pods[0].name}{more}"


def _remedy(reason: Reason) -> str:
    hints = {
        Reason.IMAGE_PULL_BACK_OFF: ". Check spec.image and whether the nodes can pull it; then delete the job and "
        "create it again",
        Reason.VOLUME_NOT_READY: ". Check that the claims of spec.volumes exist and are bound: kubectl get pvc",
        Reason.CONTAINER_CONFIG_ERROR: ". See kubectl describe pod",
    }
    return hints.get(reason, "")
