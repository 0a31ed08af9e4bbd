"""Where a step is: veRL names its stages by timers, and logs each step's metrics once; both are passed on.

veRL has callbacks for checkpoints but none for stages. Its trainer wraps every stage in `marked_timer`, which it
imports by name from `verl.utils.debug`, and reports through `Tracking.log`. Wrapping these two before the trainer
module is imported observes a run without changing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from foremoe.verl.events import EventSender
from foremoe_operator.api.constants import Stage

TIMER_STAGES: dict[str, Stage] = {
    "gen": Stage.ROLLOUT,
    "reward": Stage.ROLLOUT,
    "old_log_prob": Stage.RECOMPUTE,
    "ref": Stage.RECOMPUTE,
    "values": Stage.RECOMPUTE,
    "update_critic": Stage.UPDATE,
    "update_actor": Stage.UPDATE,
    "update_weights": Stage.WEIGHT_SYNC,
    "save_checkpoint": Stage.CHECKPOINT,
}

Timer = Callable[..., AbstractContextManager[None]]


def announcing(timer: Timer, events: EventSender) -> Timer:
    """`timer`, announcing the stage it times when it is entered, and a saved checkpoint when it is left."""

    @wraps(timer)
    @contextmanager
    def wrapped(name: str, *args: Any, **kwargs: Any) -> Iterator[None]:
        stage = TIMER_STAGES.get(name)
        if stage is not None:
            events.send("stage", stage=str(stage))
        with timer(name, *args, **kwargs):
            yield
        if stage is Stage.CHECKPOINT:
            events.send("checkpoint")

    return wrapped


def reporting(log: Callable[..., None], events: EventSender) -> Callable[..., None]:
    """`Tracking.log`, passing each step's numbers on."""

    @wraps(log)
    def wrapped(self: Any, data: dict[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        log(self, data, step, *args, **kwargs)
        events.send("step", step=int(step), metrics=plain_numbers(data))

    return wrapped


def plain_numbers(data: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a metrics dict as floats; other values are left out."""
    numbers: dict[str, float] = {}
    for name, value in data.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            numbers[str(name)] = number
    return numbers
