"""`ForeMoEJob.status`: what the operator alone writes and people read with `kubectl get`, `describe` and `wait`.

The conditions are the truth; `phase` is derived from them for the printer column. Numbers that are not whole are
strings, as Kubernetes asks of its APIs (a float does not survive every client unchanged).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from foremoe_operator.api.base import LenientModel, Timestamp, map_list
from foremoe_operator.api.constants import ConditionType, Phase, Reason, Stage

ConditionStatus = Literal["True", "False", "Unknown"]
Text = Annotated[str, Field(max_length=4096)]
Name = Annotated[str, Field(max_length=253)]
Number = Annotated[str, Field(max_length=32, pattern=r"^-?[0-9]+([.][0-9]+)?(e[+-]?[0-9]+)?$")]


class Condition(LenientModel):
    """One statement about the job, with the reason for it."""

    type: ConditionType = Field(description="What the statement is about.")
    status: ConditionStatus = Field(description="True, False or Unknown.")
    reason: Reason = Field(description="Why, as one word for programs.")
    message: Annotated[str, Field(max_length=4096)] = Field("", description="Why and what to do, for people.")
    last_transition_time: Timestamp = Field(description="When the status last changed.")
    observed_generation: int = Field(0, description="Generation of the spec the statement was made for.")


class WorkerCounts(LenientModel):
    """How many worker pods are how far."""

    desired: int = Field(0, description="Worker pods the job asks for.")
    scheduled: int = Field(0, description="Worker pods that have a node.")
    ready: int = Field(0, description="Worker pods whose agent answers.")
    failed: int = Field(0, description="Worker pods that ended with an error.")


class HeadStatus(LenientModel):
    """The pod whose end decides the job."""

    pod_name: Name = Field(description="Name of the head pod.")
    pod_uid: Annotated[str, Field(max_length=64)] = Field(
        alias="podUID", description="UID of the head pod; another pod of the same name is not this one."
    )
    service_name: Name = Field(description="Headless service over all pods of the job.")


class BalanceStatus(LenientModel):
    """Max over mean load of the ranks of an EP group, under the base placement; 1.0 is perfect."""

    mean: Number = Field(description="Mean over layers and micro-steps of the last step.")
    max: Number = Field(description="Worst layer and micro-step of the last step.")
    planned: Number | None = Field(None, description="What the plans foresaw instead: mean over the replayed passes.")
    executed: Number | None = Field(None, description="What the ranks computed in these passes.")
    as_planned: bool | None = Field(None, description="Every recorded token-expert pair ran where it was planned.")
    copies: int | None = Field(None, description="Replicas that were brought to some rank in the step.")
    exposed_transfer_seconds: Number | None = Field(
        None, description="Time compute waited for expert weights or gradients in the step."
    )


class ProgressStatus(LenientModel):
    """How far the training is, as the head's agent reported it."""

    stage: Stage = Field(description="What the head is doing.")
    step: int = Field(0, description="RL steps finished.")
    total_steps: int = Field(0, description="RL steps asked for.")
    reward: Number | None = Field(None, description="Mean reward of the last finished step.")
    step_seconds: Number | None = Field(None, description="Wall time of the last finished step.")
    balance: BalanceStatus | None = Field(None, description="Rank load balance of the last finished step.")
    started_time: Timestamp | None = Field(None, description="When veRL's driver was started.")
    first_step_time: Timestamp | None = Field(None, description="When the first step was finished.")
    last_updated_time: Timestamp | None = Field(None, description="When the agent last had news.")


class CheckpointStatus(LenientModel):
    """The newest complete checkpoint."""

    latest_step: int = Field(description="Step after which it was saved.")
    path: Annotated[str, Field(max_length=1200)] = Field(description="Its directory.")
    time: Timestamp = Field(description="When it was complete.")


class LastFailure(LenientModel):
    """Where and why the job failed."""

    reason: Reason = Field(description="Reason, as in the Failed condition.")
    pod_name: Name | None = Field(None, description="Pod the failure was seen in.")
    node_name: Name | None = Field(None, description="Node of that pod.")
    exit_code: int | None = Field(None, description="Exit code of its container.")
    message: Text = Field("", description="What happened and what to do.")
    log_tail: Text | None = Field(None, description="Last lines of its output.")
    time: Timestamp = Field(description="When the operator saw it.")


class ForeMoEJobStatus(LenientModel):
    """Observed state of a ForeMoEJob, written by the operator."""

    observed_generation: int = Field(0, description="Generation of the spec this status is about.")
    phase: Phase | None = Field(None, description="Summary of the conditions, for people.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Validated, PodsScheduled, Ready, Complete, Failed.",
        json_schema_extra=map_list("type"),
    )
    attempt: int = Field(0, description="Number of the present set of pods.")
    start_time: Timestamp | None = Field(None, description="When the operator took the job up.")
    completion_time: Timestamp | None = Field(None, description="When the job was complete or failed.")
    workers: WorkerCounts = Field(default_factory=WorkerCounts, description="Counts of worker pods.")
    head: HeadStatus | None = Field(None, description="The head pod, once all pods are created.")
    progress: ProgressStatus | None = Field(None, description="How far the training is.")
    checkpoint: CheckpointStatus | None = Field(None, description="The newest complete checkpoint.")
    last_failure: LastFailure | None = Field(None, description="Where and why the job failed.")
    status_check_failure_start_time: Timestamp | None = Field(
        None, description="Since when the head does not answer; unset while it does."
    )

    def condition(self, kind: ConditionType) -> Condition | None:
        """The condition of that type, if there is one."""
        return next((each for each in self.conditions if each.type is kind), None)

    def is_true(self, kind: ConditionType) -> bool:
        """Whether that condition is True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"
