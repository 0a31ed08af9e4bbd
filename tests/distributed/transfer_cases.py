"""Cases of the transfer engine that need no model; they run on every rank of a pool."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from foremoe.errors import TransferError
from foremoe.transfer import ControlPlane, Move, PathName, TransferEngine

SHAPES = ((6, 4), (4, 3))
# Without padding in host memory.
WIDE_SHAPES = ((8, 16), (16, 4))
WIDE_BYTES = 4 * (8 * 16 + 16 * 4)


def make_engine(world: int, *, path: str | None, nodes: int = 1) -> tuple[TransferEngine, ControlPlane]:
    group = dist.group.WORLD
    control = ControlPlane(group)
    engine = TransferEngine(
        group=group,
        control=control,
        device=torch.device("cpu"),
        expert_bytes=1 << 12,
        same_node_RR=np.kron(np.eye(nodes), np.ones((world // nodes, world // nodes))).astype(bool),
        path=None if path is None else PathName(path),
    )
    return engine, control


def weights_of(
    rank: int, expert: int, dtype: torch.dtype, shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + expert)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def bits_arrive(rank: int, world: int, *, path: str | None, dtype: str) -> dict[str, int]:
    """Every rank sends two experts to all others, twice, and gets sums back in a fixed order."""
    kind = getattr(torch, dtype)
    engine, _ = make_engine(world, path=path)
    moves = [
        Move(layer=0, expert=2 * source + which, source=source, target=target, slot=2 * source + which)
        for source in range(world)
        for which in range(2)
        for target in range(world)
        if target != source
    ]
    slots = {move.slot: [torch.empty(shape, dtype=kind) for shape in SHAPES] for move in moves}
    for round_ in range(2):
        own = {2 * rank + which: weights_of(rank, which + 10 * round_, kind) for which in range(2)}
        engine.open_step(moves, 1 << 12, read=lambda move, own=own: own[move.expert]).wait()
        pending = engine.fetch(moves, read=lambda move, own=own: own[move.expert], into=lambda move: slots[move.slot])
        pending.wait()
        pending.wait()
        for move in moves:
            if move.target == rank:
                expected = weights_of(move.source, move.expert % 2 + 10 * round_, kind)
                assert all(torch.equal(a, b) for a, b in zip(slots[move.slot], expected, strict=True))
    arrived: list[tuple[int, int]] = []
    staged = {(move.expert, move.target): [torch.empty(shape, dtype=kind) for shape in SHAPES] for move in moves}
    back = [move.reversed() for move in moves]
    engine.send(
        back,
        read=lambda move: slots[move.slot],
        into=lambda move: staged[move.expert, move.source],
        arrived=lambda move: arrived.append((move.expert, move.source)),
    ).wait()
    assert arrived == [(move.expert, move.source) for move in back if move.target == rank]
    for expert, source in arrived:
        expected = weights_of(rank, expert % 2 + 10, kind)
        assert all(torch.equal(a, b) for a, b in zip(staged[expert, source], expected, strict=True))
    times = engine.reset_times()
    engine.close()
    assert times.moved_bytes > 0
    return {name.value: count for name, count in times.moves.items()}


def across_nodes(rank: int, world: int, *, path: str | None) -> dict[str, int]:
    """Every rank's expert to all others, of which some sit on the other of two nodes; layer by layer, and twice.

    The last layer is asked for by single ranks, one after the other, as dynamic replicas are.
    """
    engine, _ = make_engine(world, path=path, nodes=2)
    layers = [
        [Move(layer=layer, expert=source, source=source, target=target, slot=source) for source, target in pairs]
        for layer, pairs in enumerate(
            [[(s, t) for s in range(world) for t in range(world) if s != t], [(0, 2), (0, 3)]]
        )
    ]
    slots = [[torch.empty(shape) for shape in WIDE_SHAPES] for _ in range(world)]
    for round_ in range(2):
        own = [weights_of(rank, layer + 10 * round_, torch.float32, WIDE_SHAPES) for layer in range(2)]
        every = [move for moves in layers for move in moves]
        engine.open_step(every, WIDE_BYTES, read=lambda move, own=own: own[move.layer]).wait()
        for moves in (layers[0], layers[1][:1], layers[1][1:], layers[1]):
            engine.fetch(moves, read=lambda move, own=own: own[move.layer], into=lambda move: slots[move.slot]).wait()
            for move in moves:
                if move.target == rank:
                    expected = weights_of(move.source, move.layer + 10 * round_, torch.float32, WIDE_SHAPES)
                    assert all(torch.equal(a, b) for a, b in zip(slots[move.slot], expected, strict=True))
    times = engine.reset_times()
    back = [move.reversed() for move in layers[0]]
    got: dict[int, list[torch.Tensor]] = {move.source: [torch.empty(s) for s in WIDE_SHAPES] for move in back}
    engine.send(
        back,
        read=lambda move: [tensor + rank for tensor in weights_of(0, move.expert, torch.float32, WIDE_SHAPES)],
        into=lambda move: got[move.source],
        arrived=lambda _move: None,
    ).wait()
    for move in back:
        if move.target == rank:
            expected = [t + move.source for t in weights_of(0, rank, torch.float32, WIDE_SHAPES)]
            assert all(torch.equal(a, b) for a, b in zip(got[move.source], expected, strict=True))
    engine.close()
    return {"network_bytes": times.network_bytes, **{name.value: count for name, count in times.moves.items()}}


def nothing_left(rank: int, world: int) -> list[str]:
    """Shared memory has no name once all ranks have mapped it."""
    earlier = own_names()
    engine, control = make_engine(world, path="host")
    control.barrier(what="test")
    left = own_names() - earlier
    engine.close()
    return sorted(left)


def own_names() -> set[str]:
    """Names of this process in the shared memory's folder; a killed process of the same number may have left some."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith(f"foremoe-{os.getpid()}-")}


def no_room(rank: int, world: int) -> dict[str, Any]:
    """The last rank cannot get shared memory: all ranks go direct together, and the bits still arrive."""
    earlier = own_names()
    engine, control = make_engine(world, path="host")
    last = world - 1
    moves = [
        Move(layer=0, expert=0, source=last, target=0, slot=0),
        Move(layer=0, expert=1, source=0, target=last, slot=0),
    ]
    own, got = weights_of(rank, 0, torch.float32), [torch.empty(shape) for shape in SHAPES]
    real = os.posix_fallocate

    def full(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == world - 1:
        os.posix_fallocate = full
    try:
        engine.open_step(moves, 1 << 12, read=lambda _move: own).wait()
        engine.fetch(moves, read=lambda _move: own, into=lambda _move: got).wait()
    finally:
        os.posix_fallocate = real
    for move in moves:
        if rank == move.target:
            sent = weights_of(move.source, 0, torch.float32)
            assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))
    control.barrier(what="test")
    times = engine.reset_times()
    engine.close()
    # What the other ranks had room for is given back.
    assert own_names() == earlier
    return {name.value: count for name, count in times.moves.items()}


def errors_are_shared(rank: int, world: int) -> tuple[str, int | None]:
    """What one rank finds is raised on all."""
    control = ControlPlane(dist.group.WORLD)

    def action() -> int:
        if rank == 1:
            raise TransferError("no good", layer=3)
        return rank

    try:
        control.agree(action, what="test")
    except TransferError as error:
        return str(error), error.rank
    raise AssertionError("no error was raised")
