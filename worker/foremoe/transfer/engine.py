"""Moves experts while the model computes.

All transfers run on one thread per process, in the order in which they were submitted; every rank submits the same
transfers in the same order, so their messages match without further agreement. The compute thread only waits when it
needs a result that is not there yet; that wait is the *exposed* time of a transfer, the rest of its duration is
*hidden*.

On CUDA the thread works on a stream of its own: it starts behind what the compute stream had queued when the transfer
was submitted, and the compute stream continues behind it (not run on a GPU so far).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from foremoe.errors import TransferError
from foremoe.transfer.control import ControlPlane
from foremoe.transfer.links import measure_links
from foremoe.transfer.moves import LinkSpeeds, Move, PathName, choose_paths
from foremoe.transfer.paths import DirectPath, HostPath, TensorsOf

__all__ = ["Pending", "TransferEngine", "TransferTimes"]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TransferTimes:
    """What moving cost this rank since it was last reset."""

    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    dynamic_exposed_seconds: float = 0.0
    """Of these, waits for what is moved within micro-steps; the rest is paid once per step."""
    moved_bytes: int = 0
    """Bytes that arrived here."""
    network_bytes: int = 0
    """Bytes that crossed to this rank from another node."""
    moves: dict[PathName, int] = field(default_factory=lambda: dict.fromkeys(PathName, 0))
    """Moves this rank took part in, by path."""


class Pending:
    """A transfer under way."""

    def __init__(self, future: Future[float], times: TransferTimes, device: torch.device) -> None:
        self._future: Future[float] | None = future
        self._times = times
        self._device = device

    def wait(self, *, layer: int | None = None, dynamic: bool = False) -> None:
        """Block until it is done; further calls return at once. Raises TransferError if it failed.

        `dynamic`: a wait that recurs in every micro-step.
        """
        if self._future is None:
            return
        future, self._future = self._future, None
        started = time.perf_counter()
        try:
            duration = future.result()
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"moving experts failed: {error}", layer=layer) from error
        waited = time.perf_counter() - started
        self._times.exposed_seconds += min(waited, duration)
        self._times.dynamic_exposed_seconds += min(waited, duration) if dynamic else 0.0
        self._times.hidden_seconds += max(0.0, duration - waited)


class TransferEngine:
    """Weights out to replicas, gradients home. One per distributed model; collective over its EP group."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        control: ControlPlane,
        device: torch.device,
        expert_bytes: int,
        same_node_RR: npt.NDArray[np.bool_],
        path: PathName | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """`path` forces one path where it is possible; chosen by measured speed if not given."""
        self._control = control
        self._device = device
        self._forced = path
        backend = dist.get_backend(group)
        own = dist.new_group(
            control.global_ranks,
            backend=backend,
            timeout=control.timeout,
            use_local_synchronization=True,
            sort_ranks=False,
        )
        assert isinstance(own, dist.ProcessGroup)  # every rank of the list is a member
        self._thread_control = ControlPlane(group, timeout=timeout)
        self._direct = DirectPath(own, self._thread_control)
        self._host = HostPath(self._thread_control, same_node_RR=same_node_RR)
        self._same_node_RR = same_node_RR
        self.speeds: LinkSpeeds = measure_links(
            self._thread_control,
            self._direct,
            self._host.hosts,
            nbytes=expert_bytes,
            device=device,
            shared_RR=self._host.shared_RR,
        )
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="foremoe-transfer")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._path_of: dict[tuple[int, int, int], PathName] = {}
        self._host_usable = True
        self.times = TransferTimes()
        self.submitted = 0
        """Transfers handed to the thread so far; equal on all ranks at equal places of a program."""

    def open_step(self, moves: Sequence[Move], nbytes: int, *, read: TensorsOf) -> Pending:
        """Choose the paths of all weight moves of a step and publish those that go through host memory.

        The weights `read` gives must not change until the next call. Moves of the step refer to this choice.
        """
        unique = list({(move.layer, move.expert, move.target): move for move in moves}.values())
        self._assign_paths(unique, nbytes)
        by_host = [move for move in unique if self._path(move) is PathName.HOST]
        if not by_host:
            return self._submit(lambda: None)
        place = 2 * _round_up(nbytes)

        def publish() -> None:
            try:
                self._host.publish(by_host, place, read=read)
            except TransferError as error:
                # Raised on all ranks together (no room in one of the shared memories).
                _log.warning("host path switched off: %s", error)
                self._host_usable = False
                self._path_of = dict.fromkeys(self._path_of, PathName.DIRECT)

        return self._submit(publish)

    def fetch(self, moves: Sequence[Move], *, read: TensorsOf, into: TensorsOf) -> Pending:
        """Bring weights to replicas. Every move must have been announced to `open_step`."""
        listed, times = list(moves), self.times

        def run() -> None:
            by_path = self._by_path(listed, self._path)
            crossed = self._host.imported_bytes
            self._host.fetch(by_path[PathName.HOST], into=into)
            times.network_bytes += self._host.imported_bytes - crossed
            self._direct.run(by_path[PathName.DIRECT], read=read, into=into)
            self._count(times, by_path, into)

        return self._submit(run)

    def send(
        self, moves: Sequence[Move], *, read: TensorsOf, into: TensorsOf, arrived: Callable[[Move], None]
    ) -> Pending:
        """Move tensors that change (gradients, optimizer state); `arrived` is called here in the order of `moves`
        for those whose target this rank is, on the transfer thread.
        """
        listed, times = list(moves), self.times

        def run() -> None:
            by_path = self._by_path(listed, self._path_back)
            self._host.run(by_path[PathName.HOST], read=read, into=into)
            self._direct.run(by_path[PathName.DIRECT], read=read, into=into)
            self._count(times, by_path, into)
            for move in listed:
                if move.target == self._control.rank:
                    arrived(move)

        return self._submit(run)

    def reset_times(self) -> TransferTimes:
        """What was counted since the last call."""
        times, self.times = self.times, TransferTimes()
        return times

    def close(self) -> None:
        """End the thread and unmap shared memory; transfers under way are finished first."""
        self._executor.shutdown(wait=True)
        self._host.close()

    def _assign_paths(self, moves: Sequence[Move], nbytes: int) -> None:
        shared_RR = self.speeds.shared_RR & self._host_usable
        if self._forced is PathName.DIRECT:
            shared_RR = np.zeros_like(shared_RR)
        speeds = LinkSpeeds(
            host_write=self.speeds.host_write if self._forced is None else float("inf"),
            host_read=self.speeds.host_read if self._forced is None else float("inf"),
            direct=self.speeds.direct,
            network=self._network_speed(),
            shared_RR=shared_RR,
        )
        paths = choose_paths(moves, nbytes, speeds)
        self._path_of = {(move.layer, move.expert, move.target): path for move, path in zip(moves, paths, strict=True)}

    def _path(self, move: Move) -> PathName:
        return self._path_of.get((move.layer, move.expert, move.target), PathName.DIRECT)

    def _network_speed(self) -> float:
        if self._forced is PathName.DIRECT or not self._host_usable or not self.speeds.network:
            return 0.0
        return self.speeds.network if self._forced is None else float("inf")

    def _path_back(self, move: Move) -> PathName:
        """Data that changes goes by host memory only within a node: its one reader gains nothing from a stop there."""
        if not self.speeds.shared_RR[move.source, move.target]:
            return PathName.DIRECT
        return self._path(move.reversed())

    @staticmethod
    def _by_path(moves: Sequence[Move], path: Callable[[Move], PathName]) -> dict[PathName, list[Move]]:
        return {name: [move for move in moves if path(move) is name] for name in PathName}

    def _count(self, times: TransferTimes, by_path: dict[PathName, list[Move]], into: TensorsOf) -> None:
        me = self._control.rank
        for name, moves in by_path.items():
            times.moves[name] += sum(me in (move.source, move.target) for move in moves)
            for move in moves:
                if move.target == me:
                    arrived = sum(tensor.nbytes for tensor in into(move))
                    times.moved_bytes += arrived
                    if name is PathName.DIRECT and not self._same_node_RR[move.source, me]:
                        times.network_bytes += arrived

    def _submit(self, action: Callable[[], None]) -> Pending:
        self.submitted += 1
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None

        def run() -> float:
            started = time.perf_counter()
            if self._stream is None:
                action()
            else:
                with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                    if ready is not None:
                        self._stream.wait_event(ready)
                    action()
                    self._stream.synchronize()
            return time.perf_counter() - started

        return Pending(self._executor.submit(run), self.times, self._device)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
