"""How fast this machine moves bytes, measured once when a model is distributed.

A few messages of a typical expert's size: a copy within host memory, one to the next rank, and from host to host where
that one is on another node. The slowest rank's figure counts, so all ranks choose the same paths. This is a probe of
tens of milliseconds, not a benchmark: it has to tell the paths apart, nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from foremoe.transfer.control import ControlPlane
from foremoe.transfer.moves import LinkSpeeds, Move, nodes_of
from foremoe.transfer.paths import DirectPath

__all__ = ["measure_links"]

_ROUNDS = 3
_MAX_BYTES = 8 << 20


def measure_links(
    control: ControlPlane,
    direct: DirectPath,
    hosts: DirectPath,
    *,
    nbytes: int,
    device: torch.device,
    shared_RR: npt.NDArray[np.bool_],
) -> LinkSpeeds:
    """Collective. `hosts` works on host memory. `nbytes`: size of one expert; probes are not larger than 8 MiB."""
    nbytes = max(1, min(nbytes, _MAX_BYTES))
    on_host = torch.zeros(nbytes, dtype=torch.uint8)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    receiver = torch.empty_like(on_device)
    ring = [
        Move(layer=0, expert=0, source=rank, target=(rank + 1) % control.size, slot=0)
        for rank in range(control.size)
        if control.size > 1
    ]

    def around() -> None:
        direct.run(ring, read=lambda _move: [on_device], into=lambda _move: [receiver])

    node_R = nodes_of(shared_RR)
    across = [move for move in ring if node_R[move.source] != node_R[move.target]]
    landing = torch.empty_like(on_host)

    def between_nodes() -> None:
        hosts.run(across, read=lambda _move: [on_host], into=lambda _move: [landing])

    seconds = np.array(
        [
            _best_of(lambda: on_host.copy_(on_device), device),
            _best_of(lambda: on_device.copy_(on_host), device),
            _best_of(around, device),
            _best_of(between_nodes, device),
        ]
    )
    slowest = control.gather(seconds, what="measuring links").max(axis=0)
    write, read, ring_rate, network = (float(nbytes / value) for value in slowest)
    return LinkSpeeds(
        host_write=write,
        host_read=read,
        direct=ring_rate,
        network=network if across else 0.0,
        shared_RR=shared_RR,
    )


def _best_of(action: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return max(best, 1e-9)
