"""What a running job reports: served by the head's agent over HTTP, and left behind as its termination message.

The operator copies it into the job's status, `foremoe run` draws it; both read nothing else of the run.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from foremoe_operator.api.base import ApiModel
from foremoe_operator.api.constants import Reason, Stage


class Problem(ApiModel):
    """Why a job cannot go on, in words that say what to do."""

    reason: Reason
    message: str = Field(max_length=1024)


class Balance(ApiModel):
    """How evenly the last step's tokens fell on the ranks of an EP group: max over mean load, 1.0 is perfect.

    Computed over the recorded routing of all passes, layers and micro-steps of the step, under the base placement for
    the job's expert-parallel size. Filler rows and padding are not counted.
    """

    mean: float = Field(description="Mean over layers and micro-steps.")
    max: float = Field(description="Worst layer and micro-step.")
    planned: float | None = Field(
        None, description="What the plans foresaw instead: mean over the replayed passes. None without plans."
    )
    executed: float | None = Field(None, description="What the ranks computed in these passes, live rows included.")
    copies: int | None = Field(None, description="Replicas that were brought to some rank in the step.")
    exposed_seconds: float | None = Field(None, description="Time compute waited for expert weights or gradients.")
    as_planned: bool | None = Field(None, description="Every recorded token-expert pair ran where it was planned.")


class CheckpointProgress(ApiModel):
    """The newest complete checkpoint."""

    step: int
    path: str
    time: datetime


class Progress(ApiModel):
    """State of the driver as the head's agent sees it."""

    stage: Stage = Stage.BOOTING
    workers_joined: int = 0
    step: int = Field(0, description="Steps finished.")
    total_steps: int = 0
    reward: float | None = Field(None, description="Mean reward of the last finished step.")
    step_seconds: float | None = Field(None, description="Wall time of the last finished step.")
    balance: Balance | None = None
    checkpoint: CheckpointProgress | None = None
    started_time: datetime | None = Field(None, description="When the driver was started.")
    first_step_time: datetime | None = Field(None, description="When the first step was finished.")
    updated_time: datetime | None = None
    exit_code: int | None = Field(None, description="Exit code of the driver, once it has ended.")
    problem: Problem | None = None
    log_tail: str = Field("", description="Last lines of the driver's output, once it has ended with an error.")
