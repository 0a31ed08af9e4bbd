"""The record of one pass: read once per micro-batch, checked, and trusted by all ranks or by none.

Counting, planning and replay must see the same routes, so they are read here and handed on. A record can be wrong: ids
out of range, an expert twice in one choice, rows that do not fit the tokens. Only the rank that holds it sees that,
and a rank that raises or goes its own way leaves the others waiting. So the ranks agree with one small reduction; if
any has a problem, all of them drop the record of the whole pass, say why, and route it live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from foremoe.errors import RoutingError
from foremoe.verl.rows import NO_RECORD, recorded_routes

__all__ = ["Observation", "check_routes", "observe"]

Routes = npt.NDArray[np.int16]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the rollout recorded for the micro-batches of one pass; `top_k` and `problem` are equal on all ranks."""

    routes: list[Routes | None]
    """Per micro-batch [tokens, moe layers, top_k]: samples one after the other, -1 where nothing is recorded."""
    top_k: int
    """Experts of a recorded choice; 0 if no rank has a record."""
    problem: str | None
    """Why the record is not used."""


def observe(
    micro_batches: Sequence[Any], *, moe_layers: list[int], experts: int, top_k: int | None, device: torch.device
) -> Observation:
    """Read and check the record of a pass; collective over all ranks. `top_k`: what the model chooses, if known."""
    problem: str | None = None
    routes: list[Routes | None] = [None] * len(micro_batches)
    try:
        routes = [recorded_routes(each, moe_layers=moe_layers) for each in micro_batches]
        for index, found in enumerate(routes):
            if found is not None:
                check_routes(found, micro_step=index, moe_layers=moe_layers, experts=experts, top_k=top_k)
    except RoutingError as error:
        problem = f"{error} (rank {dist.get_rank()})"
    found_k = max((each.shape[2] for each in routes if each is not None), default=0)
    # A rank whose micro-batches carry no record must take part too.
    agreed = torch.tensor([found_k, problem is not None], dtype=torch.int64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    if int(agreed[1]):
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        return Observation(
            routes=[None] * len(micro_batches), top_k=0, problem=next(text for text in problems if text is not None)
        )
    return Observation(routes=routes, top_k=int(agreed[0]), problem=None)


def check_routes(
    routes_TLK: Routes, *, micro_step: int, moe_layers: Sequence[int], experts: int, top_k: int | None
) -> None:
    """Raise RoutingError, naming layer and expert, for a record that cannot have come from this model.

    A row that is zero in every layer is filler, as rollout engines write it, and no fault.
    """
    where = f"the record of micro-step {micro_step}"
    if top_k is not None and routes_TLK.shape[2] != top_k:
        raise RoutingError(f"{where} has {routes_TLK.shape[2]} experts per token, the model chooses {top_k}")
    outside = (routes_TLK < NO_RECORD) | (routes_TLK >= experts)
    if outside.any():
        token, layer, choice = (int(i) for i in np.argwhere(outside)[0])
        raise RoutingError(
            f"{where} names an expert outside [0, {experts}) at token {token}",
            layer=moe_layers[layer],
            expert=int(routes_TLK[token, layer, choice]),
        )
    ordered = np.sort(routes_TLK, axis=2)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_RECORD)
    filler_T = (routes_TLK == 0).all(axis=(1, 2))
    twice[filler_T] = False
    if twice.any():
        token, layer, choice = (int(i) for i in np.argwhere(twice)[0])
        raise RoutingError(
            f"{where} names an expert twice at token {token}",
            layer=moe_layers[layer],
            expert=int(ordered[token, layer, choice]),
        )
