"""From what the head's agent reports to `status.progress` and `status.checkpoint`.

A report never takes anything back: a head that was restarted behind our back, or a shorter last report, does not turn
the step counter back, and what a report leaves out keeps its last value.
"""

from __future__ import annotations

import math
from datetime import datetime

from foremoe_operator.api.constants import Stage
from foremoe_operator.api.progress import Balance, Progress
from foremoe_operator.api.status import BalanceStatus, CheckpointStatus, ForeMoEJobStatus, ProgressStatus
from foremoe_operator.core.pods import JOINED_STAGES


def has_joined(status: ForeMoEJobStatus) -> bool:
    """Whether all ranks have joined the head at some time."""
    return status.progress is not None and (
        status.progress.stage in JOINED_STAGES or status.progress.started_time is not None
    )


def noted(
    status: ForeMoEJobStatus, heard: Progress | None, *, answered: bool | None, now: datetime
) -> ForeMoEJobStatus:
    """The status with a report written into it; `answered` tells whether the head was asked and answered."""
    if answered is not None:
        since = None if answered else status.status_check_failure_start_time or now.replace(microsecond=0)
        status = status.model_copy(update={"status_check_failure_start_time": since})
    if heard is None:
        return status
    old = status.progress or ProgressStatus(stage=Stage.BOOTING)
    if heard.step < old.step:
        return status
    new = ProgressStatus(
        stage=heard.stage,
        step=heard.step,
        total_steps=heard.total_steps or old.total_steps,
        reward=_number(heard.reward) or old.reward,
        step_seconds=_number(heard.step_seconds) or old.step_seconds,
        balance=_balance(heard.balance) or old.balance,
        started_time=heard.started_time or old.started_time,
        first_step_time=heard.first_step_time or old.first_step_time,
        last_updated_time=heard.updated_time or old.last_updated_time,
    )
    # The agent's clock ticks with every look at it; only news is worth a write.
    if new.model_copy(update={"last_updated_time": old.last_updated_time}) == old:
        new = old
    status = status.model_copy(update={"progress": new})
    if heard.checkpoint is None:
        return status
    saved = CheckpointStatus(latest_step=heard.checkpoint.step, path=heard.checkpoint.path, time=heard.checkpoint.time)
    return status.model_copy(update={"checkpoint": saved})


def _balance(balance: Balance | None) -> BalanceStatus | None:
    if balance is None:
        return None
    mean, peak = _number(balance.mean), _number(balance.max)
    if mean is None or peak is None:
        return None
    return BalanceStatus(
        mean=mean,
        max=peak,
        planned=_number(balance.planned),
        executed=_number(balance.executed),
        as_planned=balance.as_planned,
        copies=balance.copies,
        exposed_transfer_seconds=_number(balance.exposed_seconds),
    )


def _number(value: float | None) -> str | None:
    """A number as the status holds it; None for what is none (a reward may be nan when every sample was filtered)."""
    return f"{value:.4g}" if value is not None and math.isfinite(value) else None
