"""How a job ended, and which pod's end explains it.

The head's container decides: exit code 0 on the head pod of this attempt is the only way to `Complete`. When it ended
otherwise, the first cause is looked for: a worker that was killed for memory or evicted takes the head down with it,
so that such a worker explains more than the error the head died of. A worker's own error is given some seconds for the
head to end and say more; peers of a head that ended die too, and are not the cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import ValidationError

from foremoe_operator.api.constants import Reason, Role
from foremoe_operator.api.progress import Progress
from foremoe_operator.api.status import ForeMoEJobStatus
from foremoe_operator.core.conditions import tail
from foremoe_operator.core.model import Limits, Pod
from foremoe_operator.core.pods import Pods, has_failed


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a job failed: goes to `status.lastFailure` and to the Failed condition."""

    reason: Reason
    message: str
    pod: Pod | None = None
    log_tail: str = ""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the pod that explains it."""
        return self.pod.container.exit_code if self.pod is not None else None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What the pods say about the job's end. All unset: it goes on."""

    succeeded: bool = False
    failure: Failure | None = None
    confirm: bool = False
    """A pod is missing in the cache: look at the API server before calling it lost."""
    again_seconds: float | None = None
    """A worker failed; look again after this if the head has not ended by then."""


def report_of(pod: Pod | None) -> Progress | None:
    """The last words an agent left as its termination message; None if the kubelet put something else there."""
    if pod is None or pod.container.exit_code is None or not pod.container.message.lstrip().startswith("{"):
        return None
    try:
        return Progress.model_validate_json(pod.container.message)
    except ValidationError:
        return None


def ending_of(pods: Pods, status: ForeMoEJobStatus, *, live: bool, now: datetime, limits: Limits) -> Ending:
    """Whether the job has ended, and how. Only for a job all of whose pods were there once."""
    assert status.head is not None
    head = pods.head
    if head is not None and head.uid == status.head.pod_uid and head.container.exit_code == 0:
        return Ending(succeeded=True)
    if (head is None or pods.missing_workers) and not live:
        return Ending(confirm=True)
    root = _killed_worker(pods)
    if head is None or head.uid != status.head.pod_uid:
        gone = f"head pod {status.head.pod_name} is gone" if head is None else "the head pod was replaced by another"
        return Ending(failure=Failure(reason=Reason.HEAD_LOST, message=f"{gone}: deleted, evicted or its node lost"))
    if has_failed(head) and not _ended_by_deletion(head):
        return Ending(failure=root or _lost_worker(pods, head) or _of_pod(head))
    if head.deleting is not None:
        message = f"head pod {head.name} is being deleted: drained, preempted or deleted by hand"
        return Ending(failure=Failure(reason=Reason.HEAD_LOST, message=message, pod=head))
    return _worker_ending(pods, root, now=now, limits=limits)


def _worker_ending(pods: Pods, root: Failure | None, *, now: datetime, limits: Limits) -> Ending:
    failed = [pod for pod in pods.present if pod.role is Role.WORKER and (pod.ended or pod.deleting is not None)]
    if failed:
        since = min(pod.container.finished or pod.deleting or now for pod in failed)
        waited = (now - since).total_seconds()
        if waited < limits.worker_grace_seconds:
            return Ending(again_seconds=max(limits.worker_grace_seconds - waited, 0.1))
        return Ending(failure=root or _of_pod(failed[0]))
    if pods.missing_workers:
        name = f"worker {pods.missing_workers[0]}"
        return Ending(failure=Failure(reason=Reason.WORKER_LOST, message=f"the pod of {name} is gone"))
    return Ending()


def _killed_worker(pods: Pods) -> Failure | None:
    """A worker whose end is a cause by itself, the earliest if there are several."""
    killed = [
        pod
        for pod in pods.workers.values()
        if _outside_reason(pod) in (Reason.OOM_KILLED, Reason.EVICTED) and has_failed(pod)
    ]
    if not killed:
        return None
    latest = max((pod.container.finished for pod in killed if pod.container.finished), default=None)
    first = min(killed, key=lambda pod: pod.container.finished or latest or pod.created + timedelta(days=36500))
    return _of_pod(first)


def _lost_worker(pods: Pods, head: Pod) -> Failure | None:
    """The worker that failed by itself, if the head says that it ended for the loss of one."""
    report = report_of(head)
    if report is None or report.problem is None or report.problem.reason is not Reason.WORKER_LOST:
        return None
    causes = [_of_pod(pods.workers[index]) for index in sorted(pods.workers) if has_failed(pods.workers[index])]
    return next((each for each in causes if each.reason is not Reason.HEAD_LOST), None)


def _ended_by_deletion(pod: Pod) -> bool:
    """Whether it was told to go, and ended by that signal without a word of its own."""
    by_signal = (pod.container.exit_code or 0) > 128
    return pod.deleting is not None and by_signal and report_of(pod) is None and _outside_reason(pod) is None


def _outside_reason(pod: Pod) -> Reason | None:
    """The cause as Kubernetes knows it, whatever the container said."""
    if pod.container.reason == "OOMKilled":
        return Reason.OOM_KILLED
    if pod.reason in ("Evicted", "Preempting"):
        return Reason.EVICTED
    return None


def _of_pod(pod: Pod) -> Failure:
    """The failure as this pod tells it."""
    report = report_of(pod)
    log = report.log_tail if report is not None else pod.container.message
    lost = Reason.HEAD_LOST if pod.role is Role.HEAD else Reason.WORKER_LOST
    outside = _outside_reason(pod)
    if outside is Reason.OOM_KILLED:
        message = f"pod {pod.name} was killed for using more memory than its limit: raise resources.memory"
        return Failure(reason=outside, message=message, pod=pod, log_tail=tail(log))
    if outside is not None:
        return Failure(
            reason=outside, message=f"pod {pod.name}: {pod.message or pod.reason}", pod=pod, log_tail=tail(log)
        )
    if report is not None and report.problem is not None:
        message = f"pod {pod.name}: {report.problem.message}"
        return Failure(reason=report.problem.reason, message=message, pod=pod, log_tail=tail(log))
    code = pod.container.exit_code
    if code is None or pod.container.reason == "ContainerStatusUnknown":
        what = pod.message or pod.reason or ("it is being deleted" if pod.deleting else "its node does not answer")
        return Failure(reason=lost, message=f"pod {pod.name}: {what}", pod=pod)
    if pod.role is Role.WORKER:
        message = f"pod {pod.name} ended with exit code {code} while the head was running"
        return Failure(reason=Reason.WORKER_LOST, message=message, pod=pod, log_tail=tail(log))
    if pod.container.reason in ("StartError", "ContainerCannotRun"):
        message = f"pod {pod.name} could not start: {pod.container.message}"
        return Failure(reason=Reason.BOOT_FAILED, message=message, pod=pod)
    signal = f" (signal {code - 128})" if 128 < code < 160 else ""
    driver = report is not None and report.exit_code is not None
    message = f"{'the driver' if driver else f'the agent of pod {pod.name}'} ended with exit code {code}{signal}"
    return Failure(
        reason=Reason.DRIVER_ERROR if driver else Reason.BOOT_FAILED, message=message, pod=pod, log_tail=tail(log)
    )
