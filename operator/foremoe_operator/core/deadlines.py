"""Time limits of a job. They are measured from times in the status, so that a restarted operator goes on counting."""

from __future__ import annotations

from datetime import datetime

from foremoe_operator.api.constants import Reason
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.status import ForeMoEJobStatus
from foremoe_operator.core.failure import Failure
from foremoe_operator.core.model import Limits, Pod


def passed(
    spec: ForeMoEJobSpec, status: ForeMoEJobStatus, *, joined: bool, waiting_for: str, now: datetime
) -> Failure | None:
    """The deadline that is over, if one is. `waiting_for` says what the job still waits for."""
    age = _seconds_since(status.start_time, now)
    if spec.active_deadline_seconds is not None and age >= spec.active_deadline_seconds:
        message = f"the job ran longer than activeDeadlineSeconds ({spec.active_deadline_seconds} s)"
        return Failure(reason=Reason.ACTIVE_DEADLINE_EXCEEDED, message=message)
    if not joined and age >= spec.startup_deadline_seconds:
        message = (
            f"not all ranks joined within startupDeadlineSeconds ({spec.startup_deadline_seconds} s): {waiting_for}"
        )
        return Failure(reason=Reason.STARTUP_DEADLINE_EXCEEDED, message=message)
    return None


def silence(status: ForeMoEJobStatus, head: Pod | None, *, now: datetime, limits: Limits) -> Failure | None:
    """A head that answers neither us nor the kubelet for too long.

    While the kubelet's probe passes the agent is well, and only the operator cannot reach it (a network policy, an
    operator outside the cluster): no reason to end a run.
    """
    silent = _seconds_since(status.status_check_failure_start_time, now) >= limits.head_silence_seconds
    if head is None or head.ready or not silent:
        return None
    message = f"the agent of pod {head.name} has not answered for {limits.head_silence_seconds:.0f} s"
    return Failure(reason=Reason.HEAD_LOST, message=message, pod=head)


def next_seconds(spec: ForeMoEJobSpec, status: ForeMoEJobStatus, *, joined: bool, now: datetime) -> float | None:
    """Seconds until the next deadline could pass, None if there is none."""
    age = _seconds_since(status.start_time, now)
    ends = [spec.active_deadline_seconds, None if joined else spec.startup_deadline_seconds]
    return min((max(end - age, 0.0) + 0.5 for end in ends if end is not None), default=None)


def _seconds_since(start: datetime | None, now: datetime) -> float:
    return (now - start).total_seconds() if start is not None else 0.0
