"""Home experts sharded over the *twins*: the ranks with the same place in the other EP groups.

With more data-parallel ranks than one EP group, every expert has a home in each group. What only the optimizer needs
of it (fp32 master weights, gradients, moments) then exists once over the twins: the parameters of a rank are its share
of the rows of each home expert's matrices, [E_local, rows / twins, columns]. What a step computes with is gathered
once after weights have changed, in the compute dtype; gradients add up locally, at least in fp32, and are exchanged
and summed in the order of the twins once, when the step ends.

Rows rather than experts are divided, so every twin has a share of every expert: nothing is lost with fewer experts
than twins, and an ownership move stays inside each EP group. Rows that fill up a division are zero and stay so.

Always: all twins gather and sum the same layers in the same order. Gathered weights are equal on all of them.

Shapes: D twin, E home experts of this rank, N rows, C columns, P rows of a share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from foremoe.moe.experts import BankGradient
from foremoe.moe.replicas import gradient_dtype
from foremoe.transfer import ControlPlane

__all__ = ["ExpertShards", "GatheredExperts", "join_rows", "split_rows"]


def split_rows(whole_ENC: torch.Tensor, twins: int) -> torch.Tensor:
    """Shares of all twins, [D, E, P, C]; zeros fill the last ones up."""
    experts, rows, columns = whole_ENC.shape
    height = -(-rows // twins)
    if height * twins != rows:
        padded = whole_ENC.new_zeros((experts, height * twins, columns))
        padded[:, :rows] = whole_ENC
        whole_ENC = padded
    return whole_ENC.reshape(experts, twins, height, columns).transpose(0, 1).contiguous()


def join_rows(shares_DEPC: torch.Tensor, out_ENC: torch.Tensor) -> torch.Tensor:
    """Inverse of `split_rows`, into `out_ENC` and in its dtype."""
    height, rows = shares_DEPC.shape[2], out_ENC.shape[1]
    for twin, share in enumerate(shares_DEPC):
        first = min(twin * height, rows)
        last = min(first + height, rows)
        out_ENC[:, first:last].copy_(share[:, : last - first])
    return out_ENC


class GatheredExperts:
    """One layer's home experts as it computes with them, and the sums its backward adds to."""

    def __init__(
        self, parameters: Callable[[], list[nn.Parameter]], *, rows: Sequence[int], dtype: torch.dtype
    ) -> None:
        """`parameters` gives this rank's shares, `rows` the height of the whole matrices; `dtype` to compute in."""
        self.parameters = parameters
        self.rows = list(rows)
        self.dtype = dtype
        self.sums: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._seen: list[tuple[nn.Parameter, int]] = []

    @property
    def weights(self) -> list[torch.Tensor]:
        """[gate_up, down] of the home experts, whole; room for them is made on first use."""
        shares = self.parameters()
        if not self._weights or self._weights[0].device != shares[0].device:
            self._weights = [
                share.new_empty((share.shape[0], rows, share.shape[2]), dtype=self.dtype)
                for share, rows in zip(shares, self.rows, strict=True)
            ]
            self._seen = []
        return self._weights

    @property
    def fresh(self) -> bool:
        """Whether the weights are those of the parameters as they are now."""
        now = [(parameter, parameter._version) for parameter in self.parameters()]
        return len(now) == len(self._seen) and all(
            one is other and version == before for (one, version), (other, before) in zip(now, self._seen, strict=True)
        )

    def gathered(self) -> None:
        """The weights have just been brought up to date."""
        self._seen = [(parameter, parameter._version) for parameter in self.parameters()]

    def changed(self) -> None:
        """The parameters may have changed in a way that torch does not count."""
        self._seen = []

    def open_gradients(self) -> BankGradient:
        """Where a backward adds; the first one since the sums were taken overwrites."""
        started = bool(self.sums)
        if not started:
            self.sums = self._room(torch.empty_like)
        return BankGradient(gate_up=self.sums[0], down=self.sums[1], accumulate=started)

    def add(self, place: int, parts: Sequence[torch.Tensor]) -> None:
        """Add a replica's gradients to those of the expert in row `place`."""
        if not self.sums:
            self.sums = self._room(torch.zeros_like)
        for total, part in zip(self.sums, parts, strict=True):
            total[place].add_(part)

    def take_sums(self) -> list[torch.Tensor]:
        """The sums since the last call, or zeros."""
        sums, self.sums = self.sums, []
        return sums or self._room(torch.zeros_like)

    def release(self) -> None:
        """Give the memory of the weights back; they are gathered again when they are needed."""
        self._weights, self._seen = [], []

    def _room(self, make: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        wide = gradient_dtype(self.parameters()[0].dtype)
        return [make(weight, dtype=wide) for weight in self.weights]


class ShardedLayer(Protocol):
    """What is needed of a layer."""

    gathered: GatheredExperts | None


class ExpertShards:
    """Gathers and sums over the twins of this rank."""

    def __init__(self, group: dist.ProcessGroup, *, timeout: timedelta | None) -> None:
        """`group`: the twins. Collective over it."""
        self.control = ControlPlane(group, timeout=timeout)
        self._group = group
        self._layers: list[GatheredExperts] = []

    def watch(self, layers: Sequence[ShardedLayer]) -> None:
        """The layers whose experts are shared out, in order."""
        self._layers = [layer.gathered for layer in layers if layer.gathered is not None]

    def own(self, whole_ENC: torch.Tensor) -> torch.Tensor:
        """This rank's share of whole home experts."""
        return split_rows(whole_ENC, self.control.size)[self.control.rank].clone()

    def whole(self, share_EPC: torch.Tensor, rows: int, *, layer: int) -> torch.Tensor:
        """Whole home experts, from every twin's share; collective."""
        out = share_EPC.new_empty((share_EPC.shape[0], rows, share_EPC.shape[2]))
        return self._join(share_EPC.detach(), out, layer=layer)

    def refresh(self) -> None:
        """Bring gathered weights up to date where any twin's parameters have changed; collective."""
        for index in self._wherever([not layer.fresh for layer in self._layers], what="comparing expert weights"):
            layer = self._layers[index]
            for parameter, weight in zip(layer.parameters(), layer.weights, strict=True):
                self._join(parameter.detach(), weight, layer=index)
            layer.gathered()

    def refresh_before(self, layer: int) -> None:
        """`refresh` if this layer's weights are out of date, as they are on all twins after an optimizer's step."""
        if not self._layers[layer].fresh:
            self.refresh()

    def changed(self) -> None:
        """An optimizer has run."""
        for layer in self._layers:
            layer.changed()

    def collect(self) -> None:
        """Sum what backward left on the twins into the `.grad` of the parameters; collective.

        Zeros where nothing came, if a backward ran at all.
        """
        ran = self._wherever([bool(layer.sums) for layer in self._layers], what="comparing layers with gradients")
        if not ran:
            return
        for index, layer in enumerate(self._layers):
            parameters = layer.parameters()
            if not parameters[0].requires_grad:
                continue
            sums = layer.take_sums() if index in ran else []
            for which, parameter in enumerate(parameters):
                if sums:
                    share = self._summed(sums[which], layer=index).to(parameter.dtype)
                    parameter.grad = share if parameter.grad is None else parameter.grad.add_(share)
                elif parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def forget_gradients(self) -> None:
        """Drop what backward left since the last `collect`."""
        for layer in self._layers:
            layer.sums = []

    def _wherever(self, here: Sequence[bool], *, what: str) -> list[int]:
        """Layers for which `here` holds on any twin."""
        everywhere_DL = self.control.gather(np.array(here, dtype=np.int8), what=what)
        return [int(layer) for layer in np.flatnonzero(everywhere_DL.any(axis=0))]

    def _join(self, share_EPC: torch.Tensor, out_ENC: torch.Tensor, *, layer: int) -> torch.Tensor:
        share_EPC = share_EPC.to(out_ENC.dtype).contiguous()
        shares = share_EPC.new_empty((self.control.size, *share_EPC.shape))
        with self.control.guard("gathering experts over expert-parallel groups", layer=layer):
            dist.all_gather_single(shares.view(-1), share_EPC.view(-1), group=self._group)
        return join_rows(shares, out_ENC)

    def _summed(self, whole_ENC: torch.Tensor, *, layer: int) -> torch.Tensor:
        """This rank's share of the sum over the twins, added up in their order whatever the library does."""
        sent = split_rows(whole_ENC, self.control.size)
        received = torch.empty_like(sent)
        with self.control.guard("summing expert gradients over expert-parallel groups", layer=layer):
            dist.all_to_all_single(received.view(-1), sent.view(-1), group=self._group)
        total = received[0]
        for share in received[1:]:
            total.add_(share)
        # A copy, so that the memory of the other shares is not held by it.
        return total.clone()
