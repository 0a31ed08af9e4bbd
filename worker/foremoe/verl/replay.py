"""veRL's replay buffer, looking for finished samples more often.

veRL's controller polls every two seconds, which is nothing beside a rollout of minutes and most of a step of the toy
model. Used on machines without a GPU only, through `trainer.v1.sampler.custom_sampler`.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_SECONDS = 0.1


class EagerReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """As veRL's, with a shorter poll interval."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "poll_interval": POLL_SECONDS})
