"""The two ways tensors travel, behind one interface.

A path carries out a list of moves that all ranks of the group hold in the same order; each rank does its own part.
`read` gives the tensors of a move on its source, `into` the tensors to fill on its target. Nothing is converted: both
ends have equal shapes and dtypes, bytes are copied.

Both paths run on the transfer thread (`engine`) and use its own process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from foremoe.transfer.control import ControlPlane
from foremoe.transfer.moves import Move, Readers, importers, nodes_of
from foremoe.transfer.shared import SharedRegion

__all__ = ["DirectPath", "HostPath", "TensorsOf", "TransferPath"]

TensorsOf = Callable[[Move], Sequence[torch.Tensor]]

_Key = tuple[int, int, int]

# Tensors of one move: weights are two, an ownership move takes the optimizer's along.
_MAX_PARTS = 64


class TransferPath(Protocol):
    """Carries out moves; collective over the EP group even for ranks that have no part in them."""

    def run(self, moves: Sequence[Move], *, read: TensorsOf, into: TensorsOf) -> None:
        """Return when this rank's targets are filled and its sources may be overwritten."""
        ...


class DirectPath:
    """Rank to rank through the process group: NCCL between GPUs, gloo between CPUs."""

    def __init__(self, group: dist.ProcessGroup, control: ControlPlane) -> None:
        """`group` must be used by no other thread."""
        self._group = group
        self._control = control

    def run(self, moves: Sequence[Move], *, read: TensorsOf, into: TensorsOf) -> None:
        """See `TransferPath`."""
        operations = list(self._operations(moves, read, into))
        if not operations:
            return
        with self._control.guard("direct transfer of experts"):
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _operations(self, moves: Sequence[Move], read: TensorsOf, into: TensorsOf) -> Iterator[dist.P2POp]:
        me, globals_ = self._control.rank, self._control.global_ranks
        for tag, move in enumerate(moves):
            if move.source == me:
                for part, tensor in enumerate(read(move)):
                    yield dist.P2POp(
                        dist.isend, tensor, globals_[move.target], self._group, tag=_MAX_PARTS * tag + part
                    )
            elif move.target == me:
                for part, tensor in enumerate(into(move)):
                    yield dist.P2POp(
                        dist.irecv, tensor, globals_[move.source], self._group, tag=_MAX_PARTS * tag + part
                    )


class HostPath:
    """Through memory that the ranks of a node share, and between nodes from host to host.

    Every rank owns one region and writes only there. `publish` lays out a set of experts that stay valid until the
    next `publish` (weights do not change within a step), so that a later `fetch` is a copy without any message. What
    another node reads crosses to it once, with the first `fetch` that needs it: one of its readers receives the bytes
    into its own region, where the others of its node find them.
    `run` is the general form, for data that changes, within a node: write, barrier, read, barrier.
    """

    def __init__(self, control: ControlPlane, *, same_node_RR: npt.NDArray[np.bool_]) -> None:
        """Collective. `same_node_RR`: ranks the topology puts on one node; others never share memory here."""
        self._control = control
        self._published = SharedRegion(control)
        self._mailbox = SharedRegion(control)
        self._offsets: dict[_Key, int] = {}
        self._imports: dict[Readers, tuple[int, int]] = {}
        self._imported: set[Readers] = set()
        self._size = 0
        self.hosts = DirectPath(control.group, control)
        """Messages between host memories."""
        self.shared_RR: npt.NDArray[np.bool_] = self._published.visible_RR & same_node_RR
        self._node_R = nodes_of(self.shared_RR)
        self.imported_bytes = 0
        """Bytes that came to this rank from another node so far."""

    def publish(self, moves: Sequence[Move], nbytes: int, *, read: TensorsOf) -> None:
        """Put the weights of all sources of `moves` where the other ranks of the node can read them.

        Collective. `nbytes` bounds the tensors of one expert. Raises TransferError on every rank if one has no room.
        """
        # A rank may still be copying what was published before.
        self._control.barrier(what="publishing experts to host memory")
        self._offsets, used_R = self._places(moves, nbytes)
        self._imports, self._imported = {}, set()
        for readers, rank in importers(moves, self._node_R).items():
            self._imports[readers] = rank, used_R[rank]
            used_R[rank] += SharedRegion.padded(nbytes)
        self._published.reserve(used_R)
        self._write(self._published, moves, self._offsets, read)
        self._size = self._largest(moves, read, what="publishing experts to host memory")

    def fetch(self, moves: Sequence[Move], *, into: TensorsOf) -> None:
        """Copy published weights to this rank's targets.

        No message to anyone, unless some of it has yet to come from another node; collective in so far.
        """
        self._import(moves)
        for move in moves:
            if move.target == self._control.rank:
                rank, offset = self._imports.get(self._readers(move)) or (move.source, self._offsets[_key(move)])
                self._published.load(rank, offset, into(move))
        self._published.flush()

    def _import(self, moves: Sequence[Move]) -> None:
        """Bring what other nodes published and nobody here has fetched yet."""
        crossing: dict[Readers, Move] = {}
        for move in moves:
            readers = self._readers(move)
            if readers in self._imports and readers not in self._imported:
                crossing[readers] = replace(move, target=self._imports[readers][0])
        if not crossing:
            return
        self._imported |= crossing.keys()

        def leaving(move: Move) -> list[torch.Tensor]:
            return [self._published.own_bytes(self._offsets[_key(move)], self._size)]

        def arriving(move: Move) -> list[torch.Tensor]:
            return [self._published.own_bytes(self._imports[self._readers(move)][1], self._size)]

        self.hosts.run(list(crossing.values()), read=leaving, into=arriving)
        self.imported_bytes += self._size * sum(move.target == self._control.rank for move in crossing.values())
        self._control.barrier(what="bringing experts from another node")

    def _largest(self, moves: Sequence[Move], read: TensorsOf, *, what: str) -> int:
        """Bytes of the largest expert any rank sends; returns when every rank has come here."""
        mine = [_nbytes(read(move)) for move in moves if move.source == self._control.rank]
        return int(self._control.gather(np.array([max(mine, default=0)], dtype=np.int64), what=what).max())

    def _readers(self, move: Move) -> Readers:
        return move.source, move.layer, move.expert, int(self._node_R[move.target])

    def run(self, moves: Sequence[Move], *, read: TensorsOf, into: TensorsOf) -> None:
        """See `TransferPath`."""
        if not moves:
            return
        nbytes = self._largest(moves, read, what="sizes of a host transfer")
        offsets, used_R = self._places(moves, nbytes)
        self._mailbox.reserve(used_R)
        self._write(self._mailbox, moves, offsets, read)
        self._control.barrier(what="writing experts to host memory")
        self._read(self._mailbox, moves, offsets, into)
        self._control.barrier(what="reading experts from host memory")

    def close(self) -> None:
        """Unmap the shared memory."""
        self._published.close()
        self._mailbox.close()

    def _places(self, moves: Sequence[Move], nbytes: int) -> tuple[dict[_Key, int], list[int]]:
        """Equal-sized places in the region of each source, in order of first mention; bytes used per rank."""
        used_R = [0] * self._control.size
        offsets: dict[_Key, int] = {}
        for move in moves:
            if _key(move) not in offsets:
                offsets[_key(move)] = used_R[move.source]
                used_R[move.source] += SharedRegion.padded(nbytes)
        return offsets, used_R

    def _write(self, region: SharedRegion, moves: Sequence[Move], offsets: dict[_Key, int], read: TensorsOf) -> None:
        written = set()
        for move in moves:
            key = _key(move)
            if move.source == self._control.rank and key not in written:
                region.store(offsets[key], read(move))
                written.add(key)
        region.flush()

    def _read(self, region: SharedRegion, moves: Sequence[Move], offsets: dict[_Key, int], into: TensorsOf) -> None:
        for move in moves:
            if move.target == self._control.rank:
                region.load(move.source, offsets[_key(move)], into(move))
        region.flush()


def _key(move: Move) -> _Key:
    return move.source, move.layer, move.expert


def _nbytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(SharedRegion.padded(tensor.nbytes) for tensor in tensors)
