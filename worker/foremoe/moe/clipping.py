"""Clipping by the norm of all gradients, where dense ones are replicated or FSDP's, and experts sharded.

torch's own clipping takes a rank's experts for the whole model's and refuses a mixture of DTensors and plain tensors.
The norm is that of the whole model, as if one process held it: every element counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

__all__ = ["clip_gradients"]


def clip_gradients(
    dense: Iterable[torch.Tensor],
    experts: Iterable[torch.Tensor],
    *,
    max_norm: float,
    groups: Sequence[dist.ProcessGroup],
) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before, equal on all ranks.

    `dense`: reduced already, equal on all ranks or DTensors. `experts`: this rank's part. `groups`: over which experts
    are distributed, one after the other. Collective.
    """
    dense = [parameter for parameter in dense if parameter.grad is not None]
    experts = [parameter for parameter in experts if parameter.grad is not None]
    norm = _norm(dense, experts, groups=groups)
    for parameters in (dense, experts):
        _clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _norm(
    dense: Sequence[torch.Tensor], experts: Sequence[torch.Tensor], *, groups: Sequence[dist.ProcessGroup]
) -> torch.Tensor:
    device = (experts or dense)[0].device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    kind = torch.float32
    for parameter in experts:
        assert parameter.grad is not None
        kind = torch.promote_types(kind, parameter.grad.dtype)
        squares += torch.linalg.vector_norm(parameter.grad, dtype=kind).double().square()
    # Group by group: ranks of one group come to the same bits, and so does every group of the next kind.
    for group in groups:
        dist.all_reduce(squares, group=group)
    dense_norm = _get_total_norm([parameter.grad for parameter in dense if parameter.grad is not None])
    if isinstance(dense_norm, DTensor):
        dense_norm = dense_norm.full_tensor()
    return (dense_norm.to(device).double().square() + squares).sqrt().to(kind)
