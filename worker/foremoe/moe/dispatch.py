"""Which token row goes where: from a plan's token counts to index maps and split sizes, and the exchange itself.

Everything is derived from `tokens_SER` (how many tokens of source s and expert e the copy on rank r computes), on the
host and before the first row moves. The receiving side knows what every source sends, so there is no exchange of sizes
and no device-to-host read. With live routing the counts are gathered first (`runtime`), and from there on the path is
the same.

Order, the same on both sides: a source sorts its (token, expert) pairs by expert, stable in token order; each copy
takes a prefix range of the expert's pairs, lower ranks first; rows travel sorted by (target, expert). The receiver
regroups from (source, expert) to (expert, source). A token's outputs are summed in top-k order, so how its experts
were spread over ranks does not change the order of that sum.

Shapes: S source, R rank, E expert, T token, K top-k, H hidden, P pairs sent, N rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from foremoe.transfer.control import ControlPlane

__all__ = ["AllToAllDispatcher", "Dispatcher", "PairMap", "Split", "make_split", "map_pairs"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Split:
    """One rank's part of one layer's exchange. All sizes are host integers."""

    send_sizes: Sequence[int]
    """Rows to every rank [R]."""
    receive_sizes: Sequence[int]
    """Rows from every rank [R]."""
    send_order_P: IntArray
    """Position of every row sent in the pairs sorted by expert."""
    regroup_N: IntArray
    """Position in the receive buffer of every row in group order."""
    group_counts: Sequence[int]
    """Rows of every expert group held here."""

    @property
    def sent(self) -> int:
        """P: pairs this rank sends, its own included."""
        return int(self.send_order_P.size)

    @property
    def received(self) -> int:
        """N: rows this rank computes."""
        return int(self.regroup_N.size)


def make_split(from_me_ER: IntArray, to_me_SE: IntArray, group_of_E: IntArray, *, groups: int) -> Split:
    """Index maps of one rank.

    `from_me_ER`: tokens of this source per expert and target. `to_me_SE`: tokens every source sends here per expert.
    `group_of_E`: row group of each expert held here, -1 elsewhere.
    """
    pairs_E = from_me_ER.sum(axis=1)
    expert_start_E = np.cumsum(pairs_E) - pairs_E
    start_ER = expert_start_E[:, None] + np.cumsum(from_me_ER, axis=1) - from_me_ER
    send_order_P = _ranges(start_ER.T.ravel(), from_me_ER.T.ravel())

    counts_SE = to_me_SE.ravel()
    start_SE = (np.cumsum(counts_SE) - counts_SE).reshape(to_me_SE.shape)
    experts = np.flatnonzero(group_of_E >= 0)
    experts = experts[np.argsort(group_of_E[experts], kind="stable")]
    regroup_N = _ranges(start_SE[:, experts].T.ravel(), to_me_SE[:, experts].T.ravel())
    group_counts = np.zeros(groups, dtype=np.int64)
    group_counts[group_of_E[experts]] = to_me_SE[:, experts].sum(axis=0)
    return Split(
        send_sizes=from_me_ER.sum(axis=0).tolist(),
        receive_sizes=to_me_SE.sum(axis=1).tolist(),
        send_order_P=send_order_P,
        regroup_N=regroup_N,
        group_counts=group_counts.tolist(),
    )


def _ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Concatenation of `range(start, start + length)`."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    positions: IntArray = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return positions


@dataclass(frozen=True, kw_only=True)
class PairMap:
    """Device index maps between a rank's tokens and the rows it sends."""

    pair_P: torch.Tensor
    """Pair (token * K + choice) of every row sent."""
    token_P: torch.Tensor
    """Token of every row sent."""
    row_TK: torch.Tensor
    """Row of every pair; P for pairs that go nowhere."""
    regroup_N: torch.Tensor
    ungroup_N: torch.Tensor
    """Inverse of `regroup_N`."""


def map_pairs(ids_TK: torch.Tensor, split: Split, *, experts: int) -> PairMap:
    """Index maps for the expert ids a layer uses; ids outside [0, experts) go nowhere.

    `split` must have been made from these very ids; the caller compares the counts.
    """
    device, top_k = ids_TK.device, ids_TK.shape[1]
    flat = ids_TK.reshape(-1)
    by_expert = torch.argsort(torch.where(flat < 0, experts, flat), stable=True)
    pair_P = by_expert[_to_device(split.send_order_P, device)]
    row_TK = torch.full((flat.shape[0],), split.sent, dtype=torch.int64, device=device)
    row_TK[pair_P] = torch.arange(split.sent, device=device)
    regroup_N = _to_device(split.regroup_N, device)
    ungroup_N = torch.empty_like(regroup_N)
    ungroup_N[regroup_N] = torch.arange(split.received, device=device)
    return PairMap(
        pair_P=pair_P,
        token_P=torch.div(pair_P, top_k, rounding_mode="floor"),
        row_TK=row_TK.view(-1, top_k),
        regroup_N=regroup_N,
        ungroup_N=ungroup_N,
    )


def _to_device(values: IntArray, device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class Dispatcher(Protocol):
    """Moves rows between the ranks of the EP group. All ranks call it in the same order."""

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, *, send: Sequence[int], receive: Sequence[int], layer: int
    ) -> torch.Tensor:
        """Send `send[r]` consecutive rows to rank r; fill `out` with `receive[r]` rows from every rank r, and return
        it. May return `rows` instead when there is nobody else.
        """
        ...


class AllToAllDispatcher:
    """One `all_to_all_single` over the caller's process group (NCCL on GPUs, gloo on CPUs)."""

    def __init__(self, group: dist.ProcessGroup, control: ControlPlane) -> None:
        self._group = group
        self._control = control

    def exchange(
        self, rows: torch.Tensor, out: torch.Tensor, *, send: Sequence[int], receive: Sequence[int], layer: int
    ) -> torch.Tensor:
        """See `Dispatcher`."""
        if self._control.size == 1:
            return rows
        with self._control.guard("exchange of token rows", layer=layer):
            dist.all_to_all_single(out, rows, list(receive), list(send), group=self._group)
        return out
