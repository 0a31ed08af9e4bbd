"""What is moved, and over which path: the part of the transfer engine that needs no tensor.

A *move* brings one expert's tensors from one rank to another: weights from the home to a replica, gradients back. Two
paths exist. *Host*: the source publishes to memory its node shares, others copy from there; many readers cost one
write. To another node the bytes go once, from host to host, to one reader who publishes them for the others of its
node. *Direct*: rank to rank through the process group. The choice is made once per step, for all its moves together,
from bandwidths measured on this machine (`links`), and must come out equal on every rank: everything here is a pure
function of values that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

__all__ = ["LinkSpeeds", "Move", "PathName", "Readers", "choose_paths", "importers", "nodes_of", "readers_of"]


class PathName(StrEnum):
    """Ways of moving an expert."""

    HOST = "host"
    DIRECT = "direct"


@dataclass(frozen=True, kw_only=True)
class Move:
    """One expert's tensors from one rank of the EP group to another."""

    layer: int
    expert: int
    source: int
    target: int
    slot: int
    """Replica slot: on the target for weights, on the source for gradients."""

    def reversed(self) -> Move:
        """The way back: what brought weights out brings gradients home."""
        return Move(layer=self.layer, expert=self.expert, source=self.target, target=self.source, slot=self.slot)


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds:
    """Measured on this machine, the slowest rank's value; bytes a second."""

    host_write: float
    host_read: float
    direct: float
    network: float
    """Host memory to host memory of another node; 0 where that cannot be used."""
    shared_RR: npt.NDArray[np.bool_]
    """Which ranks see each other's host memory, bool [R, R]; all False where the host path cannot be used."""


def nodes_of(shared_RR: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Node of every rank: the lowest rank whose host memory it sees."""
    return np.where(shared_RR.any(axis=1), shared_RR.argmax(axis=1), np.arange(shared_RR.shape[0]))


Readers = tuple[int, int, int, int]
"""(source, layer, expert, node of the targets): moves that one write to that node's memory serves."""


def readers_of(moves: Sequence[Move], node_R: npt.NDArray[np.int64]) -> dict[Readers, list[int]]:
    """Indices of the moves that read the same bytes on the same node, in order of first mention."""
    groups: dict[Readers, list[int]] = {}
    for index, move in enumerate(moves):
        groups.setdefault((move.source, move.layer, move.expert, int(node_R[move.target])), []).append(index)
    return groups


def importers(moves: Sequence[Move], node_R: npt.NDArray[np.int64]) -> dict[Readers, int]:
    """For every expert that other nodes read through host memory, which of its targets fetches it for its node.

    The target that has fetched least so far; of equal ones the lowest rank.
    """
    fetched = [0] * node_R.size
    chosen: dict[Readers, int] = {}
    for key, group in readers_of(moves, node_R).items():
        if key[3] != node_R[key[0]]:
            rank = min((moves[index].target for index in group), key=lambda target: (fetched[target], target))
            fetched[rank] += 1
            chosen[key] = rank
    return chosen


def choose_paths(moves: Sequence[Move], nbytes: int, speeds: LinkSpeeds) -> list[PathName]:
    """Path of every move so that the busiest rank is done early (greedy, expert by expert, in list order).

    `nbytes` is the size of one expert. On the host path a source writes an expert once, however many ranks read it, and
    to another node it goes once, to one of its readers; a direct move occupies both ends. So all moves of an expert to
    one node are decided together.
    """
    node_R = nodes_of(speeds.shared_RR)
    busy_R = np.zeros(node_R.size)
    direct, write, read = (nbytes / speed for speed in (speeds.direct, speeds.host_write, speeds.host_read))
    across = nbytes / speeds.network if speeds.network else float("inf")
    chosen = [PathName.DIRECT] * len(moves)
    fetchers = importers(moves, node_R)
    written: set[tuple[int, ...]] = set()
    for key, group in readers_of(moves, node_R).items():
        source, targets = key[0], [moves[index].target for index in group]
        local = bool(speeds.shared_RR[source, targets[0]])
        by_host, by_direct = np.zeros_like(busy_R), np.zeros_like(busy_R)
        by_direct[source] = len(group) * direct
        by_direct[targets] = direct
        by_host[source] = 0.0 if key[:3] in written else write
        by_host[targets] = read
        if not local:
            by_host[[source, fetchers[key] if key in fetchers else targets[0]]] += across
        ends = [source, *targets]
        use_host = (busy_R + by_host)[ends].max() <= (busy_R + by_direct)[ends].max()
        if use_host:
            written.add(key[:3])
            for index in group:
                chosen[index] = PathName.HOST
        busy_R += by_host if use_host else by_direct
    return chosen
