"""One level-triggered decision about a job: from what is wanted and what is there to what to do next.

The job moves through three states that the status itself tells apart: pods are missing (`status.head` unset), all pods
were created once (`status.head` names the head pod), ended (Complete or Failed is True). In the first, missing objects
are created; in the second they never are again, because a pod that is gone is a failure and not a gap; in the third
every pod that may hold a GPU is deleted and nothing else happens, ever. Repeating a decision changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime

from foremoe_operator.api.constants import ConditionType, EventReason, Reason, Role
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.status import ForeMoEJobStatus, HeadStatus, LastFailure
from foremoe_operator.core import deadlines, progress
from foremoe_operator.core.conditions import Finding, merge, phase_of, shortened
from foremoe_operator.core.failure import Ending, Failure, ending_of, report_of
from foremoe_operator.core.manifests import parts, service_name
from foremoe_operator.core.model import (
    Action,
    Announce,
    Create,
    Decision,
    DeletePod,
    Job,
    Limits,
    Observed,
    Pod,
)
from foremoe_operator.core.pods import Pods, blocked_finding, ready_finding, scheduled_finding

_ATTEMPT = 1


def reconcile(job: Job, observed: Observed, now: datetime, limits: Limits) -> Decision:
    """Decide what to do about a job. Pure; never raises for any observation."""
    if job.deleting or not job.readable:
        return Decision()
    if _ended(job.status):
        pods = [pod for pod in observed.pods if pod.owner_uid == job.uid]
        return Decision(actions=tuple(_release(pods)), status=job.status)
    if job.spec is None:
        return _refuse(job, now)
    status = job.status.model_copy(
        update={
            "observed_generation": job.generation,
            "attempt": _ATTEMPT,
            "start_time": job.status.start_time or now.replace(microsecond=0),
        }
    )
    pods_of_job = Pods.of(job, job.spec, observed)
    status = status.model_copy(update={"workers": pods_of_job.counts()})
    if status.head is None:
        return _create(job, job.spec, status, observed, pods_of_job, now, limits)
    return _follow(job, job.spec, status, observed, pods_of_job, now, limits)


def _ended(status: ForeMoEJobStatus) -> bool:
    return status.is_true(ConditionType.COMPLETE) or status.is_true(ConditionType.FAILED)


def _release(pods: list[Pod]) -> Iterator[DeletePod]:
    """Frees the GPUs of an ended job. The head pod stays if its container has ended, for `kubectl logs`."""
    for pod in pods:
        if pod.deleting is None and not (pod.role is Role.HEAD and pod.ended):
            yield DeletePod(name=pod.name, uid=pod.uid)


def _refuse(job: Job, now: datetime) -> Decision:
    """A spec this operator cannot read: stored before the CRD had its present rules, or by a newer version."""
    message = "; ".join(job.problems) or "the spec cannot be read"
    findings = [Finding(type=ConditionType.VALIDATED, status="False", reason=Reason.INVALID_SPEC, message=message)]
    status = job.status.model_copy(update={"observed_generation": job.generation})
    status = _fail(status, Failure(reason=Reason.INVALID_SPEC, message=message), findings, job.generation, now)
    announce = Announce(reason=EventReason.INVALID_SPEC, message=shortened(message), warning=True)
    return Decision(actions=(announce,), status=status)


def _create(
    job: Job,
    spec: ForeMoEJobSpec,
    status: ForeMoEJobStatus,
    observed: Observed,
    pods: Pods,
    now: datetime,
    limits: Limits,
) -> Decision:
    """Some pods were never seen: create what is missing, until all were there at once."""
    final = next((each for each in observed.refusals if each.final), None)
    if final is not None:
        message = f"{final.kind} {final.name} was refused: {final.message}"
        findings = [Finding(type=ConditionType.VALIDATED, status="False", reason=Reason.POD_REJECTED, message=message)]
        return _end(job, status, Failure(reason=Reason.POD_REJECTED, message=message), findings, pods, now)
    if pods.complete:
        assert pods.head is not None
        head = HeadStatus(pod_name=pods.head.name, pod_uid=pods.head.uid, service_name=service_name(job.name))
        return _follow(job, spec, status.model_copy(update={"head": head}), observed, pods, now, limits)
    scheduled = scheduled_finding(pods, observed)
    overdue = deadlines.passed(spec, status, joined=False, waiting_for=scheduled.message, now=now)
    if overdue is not None:
        return _end(job, status, overdue, [scheduled], pods, now)
    blocked = blocked_finding(pods, now=now, limits=limits)
    waiting = Finding(
        type=ConditionType.READY, status="False", reason=Reason.WAITING_FOR_PODS, message="not all pods exist"
    )
    status = _with(status, [_validated(observed), scheduled, blocked or waiting], job.generation, now)
    # A name that an earlier job's pod still has cannot be taken; a create would only meet it.
    taken = {("Pod", pod.name) for pod in (*pods.present, *pods.foreign)}
    actions = tuple(_creations(job, spec, observed.children | taken))
    waits = limits.retry_seconds if observed.refusals or pods.foreign else None
    again = waits or deadlines.next_seconds(spec, status, joined=False, now=now)
    return Decision(actions=actions, status=status, requeue_seconds=again)


def _creations(job: Job, spec: ForeMoEJobSpec, there: Collection[tuple[str, str]]) -> Iterator[Create]:
    for kind, name, build in parts(job, spec, _ATTEMPT):
        if (kind, name) not in there:
            yield Create(manifest=build())


def _follow(
    job: Job,
    spec: ForeMoEJobSpec,
    status: ForeMoEJobStatus,
    observed: Observed,
    pods: Pods,
    now: datetime,
    limits: Limits,
) -> Decision:
    """All pods were created: watch them until the job ends."""
    heard = observed.progress or report_of(pods.head)
    status = progress.noted(status, heard, answered=observed.head_answered, now=now)
    ending = ending_of(pods, status, live=observed.live, now=now, limits=limits)
    if ending.confirm:
        return Decision(confirm=True)
    scheduled = scheduled_finding(pods, observed)
    if ending.succeeded:
        return _complete(job, status, [scheduled], pods, now)
    if ending.failure is not None:
        return _end(job, status, ending.failure, [scheduled], pods, now)
    joined = progress.has_joined(status)
    ready = _readiness(pods, observed, status, joined=joined, now=now, limits=limits)
    overdue = deadlines.passed(
        spec,
        status,
        joined=joined,
        waiting_for=scheduled.message if scheduled.status != "True" else ready.message,
        now=now,
    ) or deadlines.silence(status, pods.head, now=now, limits=limits)
    if overdue is not None:
        return _end(job, status, overdue, [scheduled, ready], pods, now)
    status = _with(status, [_validated(observed), scheduled, ready], job.generation, now)
    started = joined and not progress.has_joined(job.status)
    # Pods are never made again, but the names they are known by are: without the service nothing finds the head.
    taken = {("Pod", name) for kind, name, _ in parts(job, spec, _ATTEMPT) if kind == "Pod"}
    actions: tuple[Action, ...] = tuple(_creations(job, spec, observed.children | taken))
    if started:
        actions += (Announce(reason=EventReason.JOB_RUNNING, message=ready.message),)
    again = _next_look(spec, status, pods, ending, joined=joined, now=now, limits=limits)
    return Decision(actions=actions, status=status, requeue_seconds=again)


def _readiness(
    pods: Pods, observed: Observed, status: ForeMoEJobStatus, *, joined: bool, now: datetime, limits: Limits
) -> Finding:
    blocked = None if joined else blocked_finding(pods, now=now, limits=limits)
    since = status.status_check_failure_start_time
    silent = since is not None and (now - since).total_seconds() >= limits.silence_notice_seconds
    return blocked or ready_finding(pods, observed, joined=joined, silent=silent)


def _next_look(
    spec: ForeMoEJobSpec,
    status: ForeMoEJobStatus,
    pods: Pods,
    ending: Ending,
    *,
    joined: bool,
    now: datetime,
    limits: Limits,
) -> float | None:
    """When to look again although nothing happened."""
    times = [deadlines.next_seconds(spec, status, joined=joined, now=now), ending.again_seconds]
    if pods.head is not None and pods.head.container.started:
        times.append(limits.poll_seconds if joined else limits.start_poll_seconds)
    if not joined and any(pod.node is not None and not pod.container.started for pod in pods.present):
        times.append(limits.volume_seconds)
    return min((each for each in times if each is not None), default=None)


def _validated(observed: Observed) -> Finding:
    refusal = next((each for each in observed.refusals if each.code == 403), None)
    if refusal is not None:
        message = f"{refusal.kind} {refusal.name} was refused: {refusal.message}"
        return Finding(type=ConditionType.VALIDATED, status="False", reason=Reason.POD_REJECTED, message=message)
    return Finding(type=ConditionType.VALIDATED, status="True", reason=Reason.VALID, message="the spec is valid")


def _with(status: ForeMoEJobStatus, findings: list[Finding], generation: int, now: datetime) -> ForeMoEJobStatus:
    conditions = merge(status.conditions, findings, now=now, generation=generation)
    return status.model_copy(update={"conditions": conditions, "phase": phase_of(conditions)})


def _complete(job: Job, status: ForeMoEJobStatus, findings: list[Finding], pods: Pods, now: datetime) -> Decision:
    step = status.progress.step if status.progress is not None else 0
    message = f"the driver ended with exit code 0 after step {step}"
    over = [
        Finding(type=ConditionType.READY, status="False", reason=Reason.FINISHED, message="the job is complete"),
        Finding(type=ConditionType.COMPLETE, status="True", reason=Reason.SUCCEEDED, message=message),
    ]
    status = _ended_at(status, now)
    status = _with(status, [*findings, *over], job.generation, now)
    announce = Announce(reason=EventReason.JOB_COMPLETED, message=message)
    return Decision(actions=(*_release(pods.present), announce), status=status)


def _end(
    job: Job, status: ForeMoEJobStatus, failure: Failure, findings: list[Finding], pods: Pods, now: datetime
) -> Decision:
    status = _fail(status, failure, findings, job.generation, now)
    message = shortened(f"{failure.reason}: {failure.message}")
    announce = Announce(reason=EventReason.JOB_FAILED, message=message, warning=True)
    return Decision(actions=(*_release(pods.present), announce), status=status)


def _fail(
    status: ForeMoEJobStatus, failure: Failure, findings: list[Finding], generation: int, now: datetime
) -> ForeMoEJobStatus:
    status = _ended_at(status, now)
    last = LastFailure(
        reason=failure.reason,
        pod_name=failure.pod.name if failure.pod is not None else None,
        node_name=failure.pod.node if failure.pod is not None else None,
        exit_code=failure.exit_code,
        message=shortened(failure.message, 4096),
        log_tail=failure.log_tail or None,
        time=status.completion_time,
    )
    findings = [each for each in findings if each.type is not ConditionType.READY]
    over = [
        Finding(type=ConditionType.READY, status="False", reason=Reason.FINISHED, message="the job has failed"),
        Finding(type=ConditionType.FAILED, status="True", reason=failure.reason, message=failure.message),
    ]
    status = status.model_copy(update={"last_failure": last})
    return _with(status, [*findings, *over], generation, now)


def _ended_at(status: ForeMoEJobStatus, now: datetime) -> ForeMoEJobStatus:
    """An ended job is not looked at again, and its pods go with this decision: none of them is ready."""
    return status.model_copy(
        update={
            "completion_time": now.replace(microsecond=0),
            "status_check_failure_start_time": None,
            "workers": status.workers.model_copy(update={"ready": 0}),
        }
    )
