"""The order of transfers: the next layer's dynamic replicas are under way while a layer computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foremoe.moe.dispatch import make_split
from foremoe.moe.replicas import DynamicSlots, HomeGradients, gradient_dtype
from foremoe.transfer import LinkSpeeds, Move, PathName, choose_paths
from foremoe.transfer.moves import importers, nodes_of

HOME = [torch.zeros(2, 4, 3), torch.zeros(2, 3, 2)]


class Pending:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self, **_context: Any) -> None:
        self.log.append(f"wait {self.name}")


class Engine:
    def __init__(self) -> None:
        self.log: list[str] = []

    def fetch(self, moves: Any, *, read: Any, into: Any) -> Pending:
        name = f"fetch {moves[0].layer}"
        self.log.append(name)
        for move in moves:
            for tensor in into(move):
                tensor.fill_(move.layer)
        return Pending(self.log, name)

    def send(self, moves: Any, *, read: Any, into: Any, arrived: Any) -> Pending:
        name = f"send {moves[0].layer}"
        self.log.append(name)
        for move in moves:
            for mine, theirs in zip(into(move), read(move), strict=True):
                mine.copy_(theirs)
            arrived(move)
        return Pending(self.log, name)


def moves(layer: int) -> list[Move]:
    return [Move(layer=layer, expert=5, source=0, target=1, slot=0)]


def test_double_buffer_computes_with_one_layer_while_the_next_arrives() -> None:
    engine: Any = Engine()
    slots = DynamicSlots(engine, rank=1, read_home=lambda _layer, _expert: [tensor[0] for tensor in HOME])
    home = HomeGradients(engine, shapes=lambda _layer, _expert: [tensor[0] for tensor in HOME])
    slots.open_step(HOME, 1)
    slots.prefetch((0, 1), moves(1))
    slots.use((0, 1), moves(1))
    slots.prefetch((0, 2), moves(2))
    # Layer 2 has arrived in the other buffer, layer 1 is untouched.
    assert float(slots.bank([1]).gate_up.unique()) == 1
    slots.use((0, 2), moves(2))
    assert engine.log == ["fetch 1", "wait fetch 1", "fetch 2", "wait fetch 2"]
    # Backward: layer 2 is here still, so is layer 1.
    gradient = slots.open_gradients(1)
    gradient.gate_up.fill_(7)
    gradient.down.fill_(8)
    slots.give_back(moves(2), home)
    slots.use((0, 1), moves(1))
    assert engine.log[4:] == ["send 2"]
    # Before layer 2's buffer is used again its gradients must have left.
    slots.prefetch((0, 0), moves(0))
    assert engine.log[5:] == ["wait send 2", "fetch 0"]
    (sums,) = home.take().values()
    assert [float(total.unique()) for total in sums] == [7, 8]
    assert not home.take()


def test_gradients_travel_at_least_in_fp32() -> None:
    assert gradient_dtype(torch.bfloat16) is torch.float32
    assert gradient_dtype(torch.float16) is torch.float32
    assert gradient_dtype(torch.float64) is torch.float64


@pytest.mark.parametrize(("host", "expected"), [(1e9, PathName.DIRECT), (1e11, PathName.HOST)])
def test_the_faster_path_is_taken(host: float, expected: PathName) -> None:
    speeds = LinkSpeeds(
        host_write=host, host_read=host, direct=1e10, network=0.0, shared_RR=np.ones((2, 2), dtype=bool)
    )
    assert choose_paths(moves(0), 1 << 20, speeds) == [expected]


TWO_NODES = np.kron(np.eye(2, dtype=bool), np.ones((4, 4), dtype=bool))


@pytest.mark.parametrize(
    ("network", "expected"), [(0.0, PathName.DIRECT), (1e9, PathName.DIRECT), (1e10, PathName.HOST)]
)
def test_many_readers_share_one_write_and_one_crossing_if_the_network_is_not_too_slow(
    network: float, expected: PathName
) -> None:
    speeds = LinkSpeeds(host_write=1e10, host_read=1e10, direct=1.2e10, network=network, shared_RR=TWO_NODES)
    fan_out = [Move(layer=0, expert=1, source=0, target=target, slot=0) for target in range(1, 8)]
    paths = choose_paths(fan_out, 1 << 20, speeds)
    assert paths[:3] == [PathName.HOST] * 3
    assert paths[3:] == [expected] * 4


def test_without_shared_memory_everything_goes_directly() -> None:
    nothing = np.zeros((4, 4), dtype=bool)
    speeds = LinkSpeeds(host_write=1e12, host_read=1e12, direct=1.0, network=0.0, shared_RR=nothing)
    moves = [Move(layer=0, expert=e, source=0, target=t, slot=0) for e in range(2) for t in range(1, 4)]
    assert choose_paths(moves, 1 << 20, speeds) == [PathName.DIRECT] * 6


def test_readers_of_a_node_take_turns_in_fetching_from_another() -> None:
    moves = [Move(layer=0, expert=e, source=e % 2, target=t, slot=0) for e in range(4) for t in (1 - e % 2, 4, 5)]
    fetching = importers(moves, nodes_of(TWO_NODES))
    assert fetching == {(0, 0, 0, 4): 4, (1, 0, 1, 4): 5, (0, 0, 2, 4): 4, (1, 0, 3, 4): 5}


def test_split_of_nothing() -> None:
    split = make_split(np.zeros((4, 2), dtype=np.int64), np.zeros((2, 4), dtype=np.int64), np.arange(4), groups=4)
    assert (split.sent, split.received) == (0, 0)
