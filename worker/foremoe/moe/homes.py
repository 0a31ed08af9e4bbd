"""Home experts: which rank owns which, in which place of its packed parameters, and how ownership moves.

The packed parameters of a rank hold its home experts in a known order that every rank can compute. A move keeps the
Parameter objects (an optimizer and FSDP hold references) and exchanges contents: whoever stays keeps its place, whoever
arrives takes a place that somebody left, in order of expert id. Everything that belongs to an expert moves along:
weights, gradient, and each tensor of an attached optimizer's state that has the parameter's shape (moments, fp32
master weights). Bytes are copied, so a move changes no number.

Where experts are sharded over EP groups (`shards`), parameters are shares; `packed` and `weights` give what a step
computes with, gathered. A move carries a share to the rank of the same EP group that has the same place among twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import nn

from foremoe.errors import PlannerError, TransferError
from foremoe.moe.layer import RoutedExperts
from foremoe.moe.shards import ExpertShards
from foremoe.planner import BasePlacement
from foremoe.transfer import ControlPlane, Move, TransferEngine

__all__ = ["Homes"]


class Homes:
    """Home experts of all layers. All ranks hold the same placements and orders."""

    def __init__(
        self,
        bases: Sequence[BasePlacement],
        layers: Sequence[RoutedExperts],
        control: ControlPlane,
        shards: ExpertShards | None = None,
    ) -> None:
        """`layers` hold the experts of this rank in ascending order of their ids."""
        self.bases = list(bases)
        self.shards = shards
        self._layers = layers
        self._control = control
        self._order_LR = [
            [np.flatnonzero(base.home_E == rank).tolist() for rank in range(control.size)] for base in bases
        ]
        self._optimizers: list[torch.optim.Optimizer] = []

    def order(self, layer: int, rank: int) -> list[int]:
        """Home experts of a rank in the order of its packed parameters."""
        return self._order_LR[layer][rank]

    def packed(self, layer: int) -> list[torch.Tensor]:
        """[gate_up, down] of this rank's home experts, whole."""
        gathered = self._layers[layer].gathered
        return [each.detach() for each in self.parameters(layer)] if gathered is None else gathered.weights

    def parameters(self, layer: int) -> list[nn.Parameter]:
        """The leaf parameters behind `packed`."""
        return self._layers[layer].own_parameters()

    def weights(self, layer: int, expert: int) -> list[torch.Tensor]:
        """[gate_up, down] of one expert whose home is here."""
        place = self._place(layer, expert)
        return [tensor[place] for tensor in self.packed(layer)]

    @property
    def expert_bytes(self) -> int:
        """Size of one expert's weights."""
        return sum(tensor[0].nbytes for tensor in self.packed(0))

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves take this optimizer's state along from now on."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            if self.shards is not None:
                shards = self.shards
                # Some optimizers write past torch's counting of changes.
                optimizer.register_step_post_hook(lambda *_: shards.changed())

    def refresh(self) -> None:
        """Bring what a step computes with up to date with the parameters; collective over the twins."""
        if self.shards is not None:
            self.shards.refresh()

    def refresh_before(self, layer: int) -> None:
        """`refresh` where this layer needs it."""
        if self.shards is not None:
            self.shards.refresh_before(layer)

    def collect_gradients(self) -> None:
        """Sum gradients over the twins; collective over them."""
        if self.shards is not None:
            self.shards.collect()

    def forget_gradients(self) -> None:
        """Drop gradients that are not yet in the parameters' `.grad`."""
        if self.shards is not None:
            self.shards.forget_gradients()

    def fill_missing_gradients(self) -> None:
        """Zeros for home experts that saw no token: optimizers skip parameters without a gradient."""
        if self.shards is not None:
            return  # `collect_gradients` does so
        for layer in range(len(self._layers)):
            for parameter in self.parameters(layer):
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def add_gradients(self, layer: int, expert: int, sums: Sequence[torch.Tensor]) -> None:
        """Add to one home expert's gradient; rounded to the parameter's dtype once."""
        place = self._place(layer, expert)
        gathered = self._layers[layer].gathered
        if gathered is not None:
            if gathered.parameters()[0].requires_grad:
                gathered.add(place, sums)
            return
        for parameter, total in zip(self.parameters(layer), sums, strict=True):
            if parameter.grad is not None:
                target = parameter.grad[place]
                target.copy_(target.to(total.dtype).add_(total))

    def move_to(self, bases: Sequence[BasePlacement], engine: TransferEngine) -> int:
        """Change homes to `bases` (one per layer); how many experts moved. Collective."""
        if len(bases) != len(self.bases):
            raise PlannerError(f"{len(bases)} placements for {len(self.bases)} layers")
        for layer, (old, new) in enumerate(zip(self.bases, bases, strict=True)):
            if (old.experts, old.ranks) != (new.experts, new.ranks):
                raise PlannerError(
                    f"the placement has {new.experts} experts on {new.ranks} ranks, the model {old.experts} on "
                    f"{old.ranks}",
                    layer=layer,
                )
        self.collect_gradients()
        self._check_parts()
        return sum(self._move_layer(layer, base, engine) for layer, base in enumerate(bases))

    def per_expert_tensors(self, layer: int) -> list[torch.Tensor]:
        """All tensors of this rank with one row per home expert: weights, gradients, optimizer state."""
        tensors: list[torch.Tensor] = []
        for parameter in self.parameters(layer):
            tensors.append(parameter.detach())
            if parameter.grad is not None:
                tensors.append(parameter.grad)
            for optimizer in self._optimizers:
                state = cast("dict[str, object]", optimizer.state.get(parameter, {}))
                for name in sorted(state):
                    value = state[name]
                    if isinstance(value, torch.Tensor) and value.ndim:
                        if value.shape != parameter.shape:
                            raise TransferError(
                                f"optimizer state {name!r} of shape {list(value.shape)} belongs to no single expert: "
                                "ownership cannot move with this optimizer",
                                layer=layer,
                            )
                        tensors.append(value)
        return tensors

    def _move_layer(self, layer: int, base: BasePlacement, engine: TransferEngine) -> int:
        old = self.bases[layer]
        moved = [int(expert) for expert in np.flatnonzero(base.home_E != old.home_E)]
        if not moved:
            return 0
        moves = [
            Move(layer=layer, expert=e, source=int(old.home_E[e]), target=int(base.home_E[e]), slot=0) for e in moved
        ]
        tensors = self.per_expert_tensors(layer)
        staged: dict[Move, list[torch.Tensor]] = {}

        def into(move: Move) -> list[torch.Tensor]:
            return staged.setdefault(move, [torch.empty_like(tensor[0]) for tensor in tensors])

        engine.send(
            moves,
            read=lambda move: [tensor[self._place(layer, move.expert)] for tensor in tensors],
            into=into,
            arrived=lambda _move: None,
        ).wait(layer=layer)
        self._order_LR[layer] = [
            _reordered(order, np.flatnonzero(base.home_E == rank).tolist())
            for rank, order in enumerate(self._order_LR[layer])
        ]
        self.bases[layer] = base
        for move, parts in staged.items():
            place = self._place(layer, move.expert)
            for tensor, part in zip(tensors, parts, strict=True):
                tensor[place].copy_(part)
        return len(moved)

    def _check_parts(self) -> None:
        """Optimizer state and gradients must exist on all ranks or on none."""
        mine = self._control.agree(
            lambda: [len(self.per_expert_tensors(layer)) for layer in range(len(self._layers))],
            what="preparing an ownership move",
        )
        for rank, parts in enumerate(self._control.gather_objects(mine, what="preparing an ownership move")):
            if parts != mine:
                raise TransferError(
                    "gradients or optimizer state of experts exist on some ranks only: attach the optimizer on all of "
                    "them, and move between steps",
                    rank=rank,
                )

    def _place(self, layer: int, expert: int) -> int:
        try:
            return self._order_LR[layer][self._control.rank].index(expert)
        except ValueError:
            raise TransferError("not a home expert of this rank", layer=layer, expert=expert) from None


def _reordered(order: Sequence[int], homes: Sequence[int]) -> list[int]:
    """New order of a rank's home experts: who stays keeps the place, arrivals fill the gaps in ascending order."""
    arrivals = iter(sorted(set(homes) - set(order)))
    staying = set(homes)
    return [expert if expert in staying else next(arrivals) for expert in order]
