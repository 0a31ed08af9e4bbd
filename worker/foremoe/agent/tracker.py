"""The state of a run, folded from what its processes report.

Events come from several processes and may arrive late or twice; the step counter never goes back, and a balance belongs
to the step that is running until that step is finished. Pure but for the clock, which is passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foremoe.agent import checkpoints
from foremoe_operator.api.constants import Stage
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.progress import Balance, Problem, Progress

_REWARD_METRICS = ("critic/score/mean", "critic/rewards/mean")
_SECONDS_METRIC = "timing_s/step"
_LOG_LINES = 80


def _now() -> datetime:
    return datetime.now(UTC)


class Tracker:
    """Holds the current `Progress`; every change stamps it."""

    def __init__(self, spec: ForeMoEJobSpec, *, clock: Callable[[], datetime] = _now) -> None:
        self._clock = clock
        self._checkpoint_directory = Path(spec.checkpoint.path)
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self.metrics: dict[str, float] = {}
        """Numbers of the last finished step, by veRL's names."""
        self.progress = Progress(total_steps=spec.total_steps, updated_time=clock())

    def enter(self, stage: Stage) -> None:
        """The run is in `stage` now."""
        self._update(stage=stage)

    def joined(self, workers: int) -> None:
        """So many workers have joined."""
        self._update(workers_joined=workers)

    def driver_started(self) -> None:
        """The driver was started; a checkpoint that is already there tells where it continues."""
        self._update(stage=Stage.STARTING, started_time=self._clock())
        self.look_for_checkpoint()

    def fail(self, problem: Problem) -> None:
        """The first problem is kept: later ones tend to be its consequences."""
        if self.progress.problem is None:
            self._update(problem=problem)

    def finish(self, exit_code: int | None) -> None:
        """The run is over; None if there was no driver or it was ended by us."""
        self.look_for_checkpoint()
        tail = "\n".join(self._log) if exit_code != 0 else ""
        self._update(stage=Stage.FINISHED, exit_code=exit_code, log_tail=tail)

    def log(self, line: str) -> None:
        """Remember a line of the driver's output."""
        self._log.append(line)

    def handle(self, event: Mapping[str, Any]) -> bool:
        """Fold in one reported event; False if it makes no sense."""
        try:
            kind = event["kind"]
            if kind == "stage":
                self._stage(Stage(event["stage"]))
            elif kind == "step":
                self._step(int(event["step"]), event["metrics"])
            elif kind == "balance":
                fields = {name: event[name] for name in Balance.model_fields if name in event}
                self._update(balance=Balance.model_validate(fields))
            elif kind == "checkpoint":
                self.look_for_checkpoint()
            else:
                return False
        except (KeyError, TypeError, ValueError):
            return False
        return True

    def look_for_checkpoint(self) -> None:
        """Read from disk which checkpoint is the newest."""
        found = checkpoints.newest(self._checkpoint_directory)
        if found is not None:
            self._update(checkpoint=found)

    def _stage(self, stage: Stage) -> None:
        if self.progress.stage is not Stage.FINISHED:
            self._update(stage=stage)

    def _step(self, step: int, metrics: Mapping[str, float]) -> None:
        # veRL logs validation before training as step 0 or as the step it resumed from: nothing was finished then.
        if step <= self.progress.step or _SECONDS_METRIC not in metrics:
            return
        self.metrics = {str(name): float(value) for name, value in metrics.items()}
        reward = next((self.metrics[name] for name in _REWARD_METRICS if name in self.metrics), None)
        self._update(
            step=step,
            reward=reward,
            step_seconds=self.metrics[_SECONDS_METRIC],
            first_step_time=self.progress.first_step_time or self._clock(),
        )

    def _update(self, **changes: Any) -> None:
        self.progress = self.progress.model_copy(update={**changes, "updated_time": self._clock()})
