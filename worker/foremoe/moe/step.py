"""One step under way: what its micro-steps replay, and which split each layer call follows.

`begin_step` makes a `Step`, `micro_step(m)` makes a `MicroStep` in it, and the MoE layers ask the latter what to do. A
layer call is one of three kinds:

- *planned*: every token has a record. Split sizes come from the plan; the host reads nothing from the device.
- *planned and live*: some rows have no record. Recorded rows follow the plan, the counts of the others are gathered and
  sent to the homes.
- *counted*: the plan does not hold (a rank has fewer tokens than its record, a forecast, no step at all). Recorded
  choices are still forced, but all counts are gathered and split anew.

Which kind a micro-step is must be the same on all ranks. So the ranks exchange three integers over the host-side group
when the first MoE layer of a micro-step is reached and the number of tokens is known. Everything else is looked up by
(micro-step, layer): activation checkpointing and repeated micro-steps find the same plan and are counted once.

Shapes: M micro-step, L MoE layer, S source rank, R rank, E expert, T token, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from foremoe.errors import RoutingError
from foremoe.moe.planning import LayerPlan
from foremoe.moe.record import NO_RECORD, SKIP, MicroRecord
from foremoe.planner import assign
from foremoe.topology import Topology
from foremoe.transfer import ControlPlane, Move

__all__ = ["Kind", "MicroStep", "Step", "Tokens", "live_tokens"]

IntArray = npt.NDArray[np.int64]


class Kind(IntEnum):
    """How the layer calls of a micro-step find their splits."""

    PLANNED = 0
    PLANNED_AND_LIVE = 1
    COUNTED = 2


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Pairs of one layer call: what this rank sends and what it receives."""

    from_me_ER: IntArray
    to_me_SE: IntArray

    def plus(self, other: Tokens) -> Tokens:
        """Both together."""
        return Tokens(from_me_ER=self.from_me_ER + other.from_me_ER, to_me_SE=self.to_me_SE + other.to_me_SE)


def live_tokens(
    ids_TK: torch.Tensor, home_E: IntArray, control: ControlPlane, *, hosts_RE: npt.NDArray[np.bool_] | None,
    topology: Topology,
) -> Tokens:  # fmt: skip
    """Count `ids_TK` (ids < 0 count nothing) on all ranks and split over the homes, or exactly over `hosts_RE`.

    Collective; reads the counts on the host.
    """
    experts = int(home_E.size)
    load_E = torch.bincount(ids_TK.reshape(-1).clamp(min=-1) + 1, minlength=experts + 1)[1:]
    load_SE = control.gather(load_E.cpu().numpy(), what="gathering live expert counts")
    if hosts_RE is not None:
        tokens_SER = assign(load_SE, hosts_RE, topology=topology).tokens_SER()
        return Tokens(from_me_ER=tokens_SER[control.rank], to_me_SE=tokens_SER[..., control.rank])
    from_me_ER = np.zeros((experts, control.size), dtype=np.int64)
    from_me_ER[np.arange(experts), home_E] = load_SE[control.rank]
    return Tokens(from_me_ER=from_me_ER, to_me_SE=np.where(home_E == control.rank, load_SE, 0))


@dataclass(kw_only=True)
class Counters:
    """What was executed, per (micro-step, layer); written once however often a call is repeated."""

    source: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Recorded pairs per expert that this rank's tokens really asked for, on the device."""
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    """Rows this rank computed."""
    live: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of these, rows of tokens without a record."""
    nonfinite: dict[int, torch.Tensor] = field(default_factory=dict)
    """Per layer, whether a routing weight was not finite, on the device."""


@dataclass(kw_only=True)
class Step:
    """Constant weights, known records, one plan per layer."""

    records: list[MicroRecord]
    plans: list[LayerPlan]
    plan_seconds: float
    moved_homes: int
    forecast: bool
    fell_back: bool
    counters: Counters = field(default_factory=Counters)
    backward_layers: set[int] = field(default_factory=set)
    unplanned: set[int] = field(default_factory=set)
    live_rows: dict[int, int] = field(default_factory=dict)


class MicroStep:
    """One visit to a micro-step. Knows its tokens once the first MoE layer has been reached."""

    def __init__(self, step: Step, index: int, *, control: ControlPlane) -> None:
        self.step = step
        self.index = index
        self._in_backward = False
        self._control = control
        self._record = step.records[index]
        self._tokens: int | None = None
        self._kind = Kind.PLANNED
        self._ids_LTK: torch.Tensor | None = None
        self._plain = False

    @property
    def kind(self) -> Kind:
        """How this visit's layer calls find their splits."""
        return self._kind

    def guess_next(self, layer: int, backward: bool) -> tuple[tuple[int, int], list[Move]] | None:
        """Key and moves of the next layer with dynamic replicas after a forward or backward of `layer`.

        Once a backward has run, a forward is activation recompute, and the way leads down.
        """
        self._in_backward |= backward
        plans = self.step.plans
        for candidate in range(layer - 1, -1, -1) if self._in_backward else range(layer + 1, len(plans)):
            moves = plans[candidate].common.dynamic_moves(self.index)
            if moves:
                return (self.index, candidate), moves
        return None

    def choose(self, layer: int, live_TK: torch.Tensor) -> torch.Tensor:
        """Ids the router is to use for `live_TK`: the record where there is one."""
        recorded_TK = self._recorded(layer, live_TK)
        if self.step.forecast:
            return live_TK
        return recorded_TK if self._plain else torch.where(recorded_TK >= 0, recorded_TK, live_TK)

    def dispatched(self, layer: int, ids_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids the experts are to compute, which of them have a record [T, K]); skipped rows get SKIP."""
        recorded_TK = self._recorded(layer, ids_TK)
        if self.step.forecast:
            return torch.where(recorded_TK == SKIP, SKIP, ids_TK), torch.zeros_like(recorded_TK, dtype=torch.bool)
        if self._plain:
            return ids_TK, torch.ones_like(ids_TK, dtype=torch.bool)
        return torch.where(recorded_TK == SKIP, SKIP, ids_TK), recorded_TK >= 0

    def planned_tokens(self, layer: int) -> Tokens:
        """The plan's split of recorded rows."""
        plan = self.step.plans[layer]
        return Tokens(from_me_ER=plan.from_me_MER[self.index], to_me_SE=plan.to_me_MSE[self.index])

    def _recorded(self, layer: int, like_TK: torch.Tensor) -> torch.Tensor:
        tokens = like_TK.shape[0]
        if self._tokens is None:
            self._arrive(tokens, like_TK.device)
        if tokens != self._tokens:
            raise RoutingError(
                f"micro-step {self.index} had {self._tokens} tokens in its first MoE layer and {tokens} in this one",
                layer=layer,
            )
        assert self._ids_LTK is not None
        return self._ids_LTK[layer]

    def _arrive(self, tokens: int, device: torch.device) -> None:
        """Tell the ranks how many tokens there really are, and agree on the kind."""
        self._tokens = tokens
        record = self._record
        ids_LTK = record.ids_LTK[:, :tokens]
        if tokens > record.tokens:
            missing = (ids_LTK.shape[0], tokens - record.tokens, ids_LTK.shape[2])
            ids_LTK = torch.cat([ids_LTK, torch.full(missing, NO_RECORD, dtype=ids_LTK.dtype)], dim=1)
        live_rows = int((ids_LTK[..., 0] == NO_RECORD).sum())
        short = tokens < record.tokens
        told = np.array([short, live_rows, tokens], dtype=np.int64)
        told_S3 = self._control.gather(told, what=f"entering micro-step {self.index}")
        if self.step.forecast:
            self._kind = Kind.COUNTED
        elif told_S3[:, 0].any():
            self._kind = Kind.COUNTED
            self.step.unplanned.add(self.index)
        elif told_S3[:, 1].any():
            self._kind = Kind.PLANNED_AND_LIVE
        self.step.live_rows[self.index] = int(told_S3[:, 1].sum())
        self._plain = not bool((ids_LTK < 0).any())
        pinned = ids_LTK.contiguous().pin_memory() if device.type == "cuda" else ids_LTK
        self._ids_LTK = pinned.to(device, non_blocking=True)
