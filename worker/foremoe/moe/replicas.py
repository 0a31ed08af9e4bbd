"""Replica weights on this rank, and the way of their gradients home.

Two kinds of slots hold replicas. *Step slots* belong to one layer, are filled once per step and give their gradients
back once, at its end. *Dynamic slots* are shared by all layers: two buffers take turns, one being computed with while
the other is filled for the next layer (the previous one in backward), and gradients leave after every backward of a
layer. Which layer comes next is guessed; all ranks see the same sequence of layer calls and guess alike, and a wrong
guess costs time, not correctness.

Gradients accumulate in fp32, or in the parameter's dtype where that is wider. At the home they are summed in a fixed
order (micro-step by micro-step for dynamic slots, then step replicas by rank), so equal runs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from foremoe.moe.experts import Bank, BankGradient
from foremoe.moe.planning import CommonPlan
from foremoe.transfer import Move, Pending, TransferEngine

__all__ = ["DynamicSlots", "HomeAccess", "HomeGradients", "LayerReplicas", "StepSlots"]

HomeAccess = Callable[[int, int], list[torch.Tensor]]
"""(layer, expert) -> [gate_up, down] of an expert whose home this rank is."""


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what replica gradients accumulate and travel."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(kw_only=True)
class _Slots:
    """Room for some experts of one layout: weights, and gradients once there is a backward."""

    gate_up: torch.Tensor
    down: torch.Tensor
    grad_gate_up: torch.Tensor | None = None
    grad_down: torch.Tensor | None = None

    @classmethod
    def like(cls, home: Sequence[torch.Tensor], count: int) -> _Slots:
        """Empty slots for `count` experts with the shapes of `home` (packed gate_up and down)."""
        gate_up, down = (tensor.new_empty((count, *tensor.shape[1:])) for tensor in home)
        return cls(gate_up=gate_up, down=down)

    @property
    def count(self) -> int:
        return int(self.gate_up.shape[0])

    @property
    def nbytes(self) -> int:
        parts = (self.gate_up, self.down, self.grad_gate_up, self.grad_down)
        return sum(part.nbytes for part in parts if part is not None)

    def weights(self, slot: int) -> list[torch.Tensor]:
        return [self.gate_up[slot], self.down[slot]]

    def gradients(self, slot: int) -> list[torch.Tensor]:
        assert self.grad_gate_up is not None and self.grad_down is not None  # backward made them
        return [self.grad_gate_up[slot], self.grad_down[slot]]

    def bank(self, counts: Sequence[int]) -> Bank:
        used = len(counts)
        return Bank(gate_up=self.gate_up[:used], down=self.down[:used], counts=counts)

    def open_gradients(self, used: int, *, accumulate: bool) -> BankGradient:
        if self.grad_gate_up is None or self.grad_down is None:
            wide = gradient_dtype(self.gate_up.dtype)
            self.grad_gate_up = torch.empty_like(self.gate_up, dtype=wide)
            self.grad_down = torch.empty_like(self.down, dtype=wide)
        return BankGradient(gate_up=self.grad_gate_up[:used], down=self.grad_down[:used], accumulate=accumulate)


class StepSlots:
    """One layer's step replicas on this rank."""

    def __init__(self) -> None:
        self._slots: _Slots | None = None
        self._pending: Pending | None = None
        self.used = 0
        self.gradient_started = False

    def open_step(self, home: Sequence[torch.Tensor], used: int) -> None:
        """Make room for `used` replicas; their weights arrive with `arriving`."""
        if used and (self._slots is None or self._slots.count < used or self._slots.gate_up.device != home[0].device):
            self._slots = _Slots.like(home, used)
        self.used = used
        self.gradient_started = False

    def arriving(self, pending: Pending) -> None:
        """The push that fills the slots."""
        self._pending = pending

    def weights_of(self, move: Move) -> list[torch.Tensor]:
        """Where the weights of a replica go."""
        assert self._slots is not None
        return self._slots.weights(move.slot)

    def gradients_of(self, move: Move) -> list[torch.Tensor]:
        """What a replica has accumulated in this step; `move` is the way home."""
        assert self._slots is not None
        return self._slots.gradients(move.slot)

    def wait(self, layer: int) -> None:
        """Return when the weights are there."""
        if self._pending is not None:
            self._pending.wait(layer=layer)
            self._pending = None

    def bank(self, counts: Sequence[int]) -> Bank:
        """The replicas in use."""
        assert self._slots is not None
        return self._slots.bank(counts)

    def open_gradients(self) -> BankGradient:
        """Where a backward adds; the first one of a step overwrites."""
        assert self._slots is not None
        gradient = self._slots.open_gradients(self.used, accumulate=self.gradient_started)
        self.gradient_started = True
        return gradient

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return 0 if self._slots is None else self._slots.nbytes


@dataclass(kw_only=True)
class _Buffer:
    slots: _Slots | None = None
    holds: tuple[int, int] | None = None
    """(micro-step, layer) whose replicas are in here."""
    filling: Pending | None = None
    leaving: Pending | None = None
    """Gradients on their way; the buffer must not be touched before."""


class DynamicSlots:
    """The two buffers of dynamic replicas that all layers share."""

    def __init__(self, engine: TransferEngine, *, rank: int, read_home: HomeAccess) -> None:
        self._engine = engine
        self._rank = rank
        self._read_home = read_home
        self._buffers = (_Buffer(), _Buffer())
        self._last = 0

    def open_step(self, home: Sequence[torch.Tensor], used: int) -> None:
        """Make room for `used` replicas a buffer; what they held is stale."""
        for buffer in self._buffers:
            self._settle(buffer)
            buffer.holds = None
            if used and (
                buffer.slots is None or buffer.slots.count < used or buffer.slots.gate_up.device != home[0].device
            ):
                buffer.slots = _Slots.like(home, used)

    def prefetch(self, key: tuple[int, int], moves: Sequence[Move]) -> None:
        """Start filling the buffer that is not in use with the replicas of `key`; nothing if they are here."""
        if any(buffer.holds == key for buffer in self._buffers):
            return
        index = 1 - self._last
        buffer = self._buffers[index]
        self._settle(buffer)
        slots = buffer.slots
        buffer.holds = key

        def into(move: Move) -> list[torch.Tensor]:
            assert slots is not None
            return slots.weights(move.slot)

        buffer.filling = self._engine.fetch(
            moves, read=lambda move: self._read_home(move.layer, move.expert), into=into
        )

    def use(self, key: tuple[int, int], moves: Sequence[Move]) -> None:
        """Return when the replicas of `key` are here; they are the ones in use from now on."""
        self.prefetch(key, moves)
        self._last = next(index for index, buffer in enumerate(self._buffers) if buffer.holds == key)
        buffer = self._buffers[self._last]
        if buffer.filling is not None:
            buffer.filling.wait(layer=key[1], dynamic=True)
            buffer.filling = None

    def bank(self, counts: Sequence[int]) -> Bank:
        """Replicas in use on this rank."""
        slots = self._buffers[self._last].slots
        assert slots is not None
        return slots.bank(counts)

    def open_gradients(self, used: int) -> BankGradient:
        """Where the backward of the layer in use writes."""
        buffer = self._buffers[self._last]
        assert buffer.slots is not None
        if buffer.leaving is not None:
            buffer.leaving.wait(dynamic=True)
            buffer.leaving = None
        return buffer.slots.open_gradients(used, accumulate=False)

    def give_back(self, moves: Sequence[Move], home: HomeGradients) -> None:
        """Send the gradients just computed home; `moves` are the weight moves of the layer in use."""
        buffer = self._buffers[self._last]
        slots = buffer.slots

        def read(move: Move) -> list[torch.Tensor]:
            assert slots is not None
            return slots.gradients(move.slot)

        buffer.leaving = home.receive(moves, read=read)

    def settle(self) -> None:
        """Return when nothing is under way."""
        for buffer in self._buffers:
            self._settle(buffer)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(buffer.slots.nbytes for buffer in self._buffers if buffer.slots is not None)

    @staticmethod
    def _settle(buffer: _Buffer) -> None:
        for pending in (buffer.filling, buffer.leaving):
            if pending is not None:
                pending.wait(dynamic=True)
        buffer.filling = buffer.leaving = None


class HomeGradients:
    """What replicas send to the experts whose home is here, summed until the step ends."""

    def __init__(self, engine: TransferEngine, *, shapes: Callable[[int, int], list[torch.Tensor]]) -> None:
        """`shapes` gives tensors like one expert's weights, for any (layer, expert) of this rank."""
        self._engine = engine
        self._like = shapes
        self._sums: dict[tuple[int, int], list[torch.Tensor]] = {}

    def receive(self, moves: Sequence[Move], *, read: Callable[[Move], list[torch.Tensor]]) -> Pending:
        """Bring gradients home along the reverse of the weight moves `moves`, in their order."""
        staged: dict[Move, list[torch.Tensor]] = {}

        def into(move: Move) -> list[torch.Tensor]:
            if move not in staged:
                staged[move] = [
                    torch.empty_like(tensor, dtype=gradient_dtype(tensor.dtype))
                    for tensor in self._like(move.layer, move.expert)
                ]
            return staged[move]

        def arrived(move: Move) -> None:
            got = staged.pop(move)
            key = (move.layer, move.expert)
            if key in self._sums:
                for total, part in zip(self._sums[key], got, strict=True):
                    total.add_(part)
            else:
                self._sums[key] = got

        return self._engine.send([move.reversed() for move in moves], read=read, into=into, arrived=arrived)

    def take(self) -> Mapping[tuple[int, int], list[torch.Tensor]]:
        """Everything received since the last call: (layer, expert) -> [gate_up, down]; no transfer may be under way."""
        sums, self._sums = self._sums, {}
        return dict(sorted(sums.items()))

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(tensor.nbytes for tensors in self._sums.values() for tensor in tensors)


@dataclass(kw_only=True)
class LayerReplicas:
    """The `Replicas` of one layer in one micro-step (see `layer`)."""

    common: CommonPlan
    micro_step: int
    step: StepSlots
    step_used: int
    dynamic: DynamicSlots | None
    dynamic_used: int
    home: HomeGradients
    guess_next: Callable[[int, bool], tuple[tuple[int, int], list[Move]] | None]
    """(layer, in backward) -> key and moves of the layer to prefetch for."""
    backward_ran: Callable[[int], None]
    moves: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.moves = self.common.dynamic_moves(self.micro_step)

    def banks(self, counts: Sequence[int]) -> list[Bank]:
        """Step replicas, then dynamic ones, those that exist."""
        banks = []
        if self.step_used:
            self.step.wait(self.common.layer)
            banks.append(self.step.bank(counts[: self.step_used]))
        if self.dynamic is not None and self.moves:
            self.dynamic.use((self.micro_step, self.common.layer), self.moves)
            if self.dynamic_used:
                banks.append(self.dynamic.bank(counts[self.step_used :]))
        return banks

    def gradients(self) -> list[BankGradient]:
        """In the order of `banks`."""
        targets = []
        if self.step_used:
            targets.append(self.step.open_gradients())
        if self.dynamic is not None and self.dynamic_used:
            targets.append(self.dynamic.open_gradients(self.dynamic_used))
        return targets

    def finished_forward(self) -> None:
        """Fetch for the next layer."""
        self._prefetch(backward=False)

    def finished_backward(self) -> None:
        """Send dynamic gradients home, fetch for the layer below."""
        self.backward_ran(self.common.layer)
        if self.dynamic is not None and self.moves:
            self.dynamic.give_back(self.moves, self.home)
        self._prefetch(backward=True)

    def _prefetch(self, *, backward: bool) -> None:
        upcoming = self.guess_next(self.common.layer, backward) if self.dynamic is not None else None
        if self.dynamic is not None and upcoming is not None:
            self.dynamic.prefetch(*upcoming)
