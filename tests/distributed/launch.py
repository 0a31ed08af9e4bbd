"""A pool of processes that form a process group and run test cases together.

Starting a process group costs seconds (interpreter, torch, transformers, veRL), a case milliseconds. So all ranks are
forked from one server that has imported these, and one pool serves many cases: each case is a module-level function
`case(rank, world, **arguments)` that every rank calls. The rendezvous store lives in the test process, so that any rank
may die. A case that fails or hangs on any rank ends the pool, since its groups may be in any state; the error lists
every rank's traceback and names the ranks that gave no answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

CASE_SECONDS = 250.0
# Kernels of the planner may have to be compiled first, on a machine that does other things.
GROUP_SECONDS = 300.0


class RanksFailed(AssertionError):
    """A case failed on some rank; the message holds all tracebacks."""


@dataclass
class _Failure:
    text: str


class RankPool:
    """`world` processes in one gloo group, one thread each."""

    def __init__(self, world: int, *, group_seconds: float = GROUP_SECONDS) -> None:
        import torch.distributed as dist

        # veRL chooses its platform when it is imported.
        os.environ.setdefault("VERL_PLATFORM", "cpu")
        self.world = world
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.preload"])
        self._store = dist.TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
        self._stacks = [tempfile.NamedTemporaryFile("w+", suffix=f"-rank{rank}") for rank in range(world)]  # noqa: SIM115
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world, self._store.port, theirs, group_seconds, self._stacks[rank].name),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(seconds=120.0, what="starting the group")

    def run(self, case: Callable[..., Any], *, seconds: float = CASE_SECONDS, **arguments: Any) -> list[Any]:
        """What the case returned on every rank; raises RanksFailed."""
        for pipe in self._pipes:
            pipe.send((case, arguments))
        return self._collect(seconds=seconds, what=case.__name__)

    def run_each(
        self, case: Callable[..., Any], *, ranks: Collection[int], seconds: float = CASE_SECONDS, **arguments: Any
    ) -> dict[int, Any]:
        """Like `run` for cases in which other ranks than these die: rank -> result, error text or stack.

        The pool is closed, without waiting for the other ranks.
        """
        for pipe in self._pipes:
            pipe.send((case, arguments))
        answers = self._answers(seconds, ranks)
        found = {rank: answer.text if isinstance(answer, _Failure) else answer for rank, answer in answers.items()}
        for rank in ranks:
            if rank not in found:
                found[rank] = f"no answer within {seconds} s: {self._stack(rank)}"
        self.close()
        return found

    @property
    def usable(self) -> bool:
        """False once a case has failed."""
        return bool(self._processes)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        for pipe in self._pipes:
            pipe.close()
        for stack in self._stacks:
            stack.close()

    def _collect(self, *, seconds: float, what: str) -> list[Any]:
        answers = self._answers(seconds, range(self.world))
        silent = [rank for rank in range(self.world) if rank not in answers]
        failed = {rank: answer.text for rank, answer in answers.items() if isinstance(answer, _Failure)}
        if not silent and not failed:
            return [answers[rank] for rank in range(self.world)]
        text = [f"{what}: ranks {sorted(failed)} failed, ranks {silent} did not answer within {seconds} s"]
        text += [f"--- rank {rank}\n{trace}" for rank, trace in sorted(failed.items())]
        for rank in silent:
            text.append(f"--- rank {rank} was at\n{self._stack(rank)}")
        self.close()
        raise RanksFailed("\n".join(text))

    def _answers(self, seconds: float, ranks: Collection[int]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        pending: Mapping[Connection, int] = {self._pipes[rank]: rank for rank in ranks}
        deadline = time.monotonic() + seconds
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), timeout=left):
                rank = pending[pipe]  # type: ignore[index]
                with contextlib.suppress(EOFError, ConnectionResetError):
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                pending = {other: r for other, r in pending.items() if r != rank}
        return answers

    def _stack(self, rank: int) -> str:
        import signal

        process = self._processes[rank]
        if not process.is_alive():
            return f"dead, exit code {process.exitcode}"
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        self._stacks[rank].seek(0)
        return self._stacks[rank].read()


def _serve(rank: int, world: int, port: int, pipe: Connection, group_seconds: float, stack_path: str) -> None:
    import signal

    stack = open(stack_path, "w")  # noqa: SIM115  # lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stack)
    import torch
    import torch.distributed as dist

    if hasattr(os, "SCHED_BATCH"):
        # With more ranks than cores a rank is often preempted, by the peer it has just woken, while it holds a lock
        # that gloo's event loop then spins on; batch processes preempt nobody when they wake up.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # The default group becomes the EP group of most cases: its timeout is what a dead peer costs.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=group_seconds))
    pipe.send(None)
    while True:
        try:
            case, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = case(rank, world, **arguments)
        except BaseException:
            answer = _Failure(traceback.format_exc())
        pipe.send(answer)


class Pools:
    """Pools by size, started on first use and restarted after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, world: int) -> RankPool:
        """The pool of this size."""
        pool = self._pools.get(world)
        if pool is None or not pool.usable:
            pool = self._pools[world] = RankPool(world)
        return pool

    def close(self) -> None:
        """End all pools."""
        for pool in self._pools.values():
            pool.close()


@contextlib.contextmanager
def pool_of(world: int, *, group_seconds: float = GROUP_SECONDS) -> Iterator[RankPool]:
    """A pool of its own, for cases that break it."""
    pool = RankPool(world, group_seconds=group_seconds)
    try:
        yield pool
    finally:
        pool.close()
