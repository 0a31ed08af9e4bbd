"""Whole tensors out of a distributed model: for the rollout's weight update and for export.

Dense parameters are gathered by FSDP, experts over the EP group, one tensor at a time, under the names and in the
shapes of the undistributed model. Every rank must walk through all of them, because each is a collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from foremoe.moe import ExpertParallelRuntime

__all__ = ["full_state_on_rank_0", "streamed_weights"]


def streamed_weights(
    runtime: ExpertParallelRuntime, *, device: torch.device, model_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under the names that inference engines load: one per expert and projection; collective at every item."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    yield from unfuse_moe_params(runtime.named_full_tensors(device=device), model_type)


def full_state_on_rank_0(runtime: ExpertParallelRuntime, *, device: torch.device) -> dict[str, Any]:
    """The whole model on the host of rank 0, nothing elsewhere; collective."""
    keeps = dist.get_rank() == 0
    state: dict[str, Any] = {}
    for name, tensor in runtime.named_full_tensors(device=device):
        if keeps:
            state[name] = tensor.cpu()
    return state
