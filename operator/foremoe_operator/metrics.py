"""Every metric of the operator, in one place: their names are API.

Gauges with a job's name in them are removed with the job, so that a long-lived operator does not collect them.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from foremoe_operator.api.constants import ConditionType, Phase
from foremoe_operator.api.status import ForeMoEJobStatus
from foremoe_operator.core.model import Job
from foremoe_operator.core.progress import has_joined

_JOB: Final = ("namespace", "job")

OPERATOR_INFO: Final = Gauge("foremoe_operator_info", "Version of the operator; always 1.", ("version",))
JOB_INFO: Final = Gauge("foremoe_job_info", "What a job asks for; always 1.", (*_JOB, "uid", "image"))
JOB_STATUS: Final = Gauge("foremoe_job_status", "1 for the phase a job is in, else 0.", (*_JOB, "phase"))
JOB_CONDITION: Final = Gauge(
    "foremoe_job_condition", "1 for the status a condition of a job has, else 0.", (*_JOB, "type", "status")
)
JOB_ALLOCATED_GPUS: Final = Gauge("foremoe_job_allocated_gpus", "GPUs of worker pods that have a node.", _JOB)
JOB_STEP: Final = Gauge("foremoe_job_step", "RL steps a job has finished.", _JOB)
JOB_REWARD: Final = Gauge("foremoe_job_reward", "Mean reward of a job's last step.", _JOB)
JOB_STEP_SECONDS: Final = Gauge("foremoe_job_step_seconds", "Wall time of a job's last step.", _JOB)
JOB_IMBALANCE: Final = Gauge(
    "foremoe_job_imbalance",
    "Max over mean rank load of a job's last step under the base placement; 1.0 is perfect.",
    (*_JOB, "over"),
)
JOB_STARTUP_SECONDS: Final = Histogram(
    "foremoe_job_startup_seconds",
    "From creation of a job to the first status with all ranks joined.",
    buckets=(5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600),
)
CREATE_SECONDS: Final = Histogram(
    "foremoe_create_seconds",
    "Time to create the missing objects of a job.",
    buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
RECONCILE_SECONDS: Final = Histogram(
    "foremoe_reconcile_seconds",
    "Time of one look at one job.",
    ("result",),
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10),
)
RECONCILE_ERRORS: Final = Counter("foremoe_reconcile_errors", "Looks at a job that ended with an error.")
WATCH_TIMESTAMP: Final = Gauge(
    "foremoe_watch_last_event_timestamp_seconds", "When the last event of a kind arrived.", ("kind",)
)
QUEUE_LENGTH: Final = Gauge("foremoe_queue_length", "Jobs that wait to be looked at.")

_BY_JOB: Final = (
    JOB_INFO, JOB_STATUS, JOB_CONDITION, JOB_ALLOCATED_GPUS, JOB_STEP, JOB_REWARD, JOB_STEP_SECONDS, JOB_IMBALANCE,
)  # fmt: skip


def observe(job: Job, status: ForeMoEJobStatus) -> None:
    """Show a job's status, and count its start-up when it is first seen running."""
    labels = (job.namespace, job.name)
    if job.spec is not None:
        JOB_INFO.labels(*labels, job.uid, job.spec.image).set(1)
        JOB_ALLOCATED_GPUS.labels(*labels).set(status.workers.scheduled * job.spec.workers.gpus_per_worker)
    for phase in Phase:
        JOB_STATUS.labels(*labels, phase).set(phase is status.phase)
    for kind in ConditionType:
        condition = status.condition(kind)
        for value in ("True", "False", "Unknown"):
            held = condition.status if condition is not None else "Unknown"
            JOB_CONDITION.labels(*labels, kind, value).set(held == value)
    if has_joined(status) and not has_joined(job.status):
        ready = status.condition(ConditionType.READY)
        if ready is not None:
            JOB_STARTUP_SECONDS.observe(max((ready.last_transition_time - job.created).total_seconds(), 0.0))
    _observe_progress(labels, status)


def _observe_progress(labels: tuple[str, str], status: ForeMoEJobStatus) -> None:
    progress = status.progress
    if progress is None:
        return
    JOB_STEP.labels(*labels).set(progress.step)
    if progress.reward is not None:
        JOB_REWARD.labels(*labels).set(float(progress.reward))
    if progress.step_seconds is not None:
        JOB_STEP_SECONDS.labels(*labels).set(float(progress.step_seconds))
    if progress.balance is not None:
        JOB_IMBALANCE.labels(*labels, "mean").set(float(progress.balance.mean))
        JOB_IMBALANCE.labels(*labels, "max").set(float(progress.balance.max))


def forget(labels: tuple[str, str]) -> None:
    """Remove everything about a job that is gone."""
    for gauge in _BY_JOB:
        gauge.remove_by_labels({"namespace": labels[0], "job": labels[1]})
