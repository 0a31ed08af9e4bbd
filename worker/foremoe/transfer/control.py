"""Host-side messages of one EP group: small, off the device, and able to say who is missing.

The data plane (token rows, expert weights) runs over the caller's process group, NCCL on GPUs. Everything that
decides what the data plane does (counts, plans, digests, status) is a few kilobytes of host memory and goes over a
gloo group of the same ranks, so that no decision waits for a device. Work of the transfer thread has a group of its
own: collectives of one group must be issued in one order, and two threads have none.

A collective that fails says nothing about the culprit. Therefore every failing rank signs in the job's key-value
store and reads who else did; a rank that did not is dead or stuck, and its number is in the error.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from foremoe.errors import ForeMoEError, TransferError

__all__ = ["ControlPlane", "timeout_of"]

T = TypeVar("T")

# Ranks notice a failure at slightly different times; later than this a peer counts as gone.
_SIGN_IN_SECONDS = 5.0


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long collectives of `group` wait; a new group would otherwise get the library's default of half an hour."""
    for kind in ("cuda", "cpu"):
        try:
            options = group._get_backend(torch.device(kind)).options
        except (RuntimeError, AttributeError):
            continue
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


class ControlPlane:
    """Collectives on host memory among the ranks of one EP group. Ranks are numbered inside the group."""

    def __init__(self, group: dist.ProcessGroup, *, timeout: timedelta | None = None) -> None:
        """Collective over `group`. `timeout` bounds every wait; the process group's own if not given."""
        self.global_ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank: int = dist.get_rank(group)
        self.size: int = len(self.global_ranks)
        self.timeout: timedelta | None = timeout or timeout_of(group)
        made = dist.new_group(
            self.global_ranks, backend="gloo", timeout=self.timeout, use_local_synchronization=True, sort_ranks=False
        )
        assert isinstance(made, dist.ProcessGroup)  # every rank of the list is a member
        self.group: dist.ProcessGroup = made
        self._store_key = f"foremoe/{made.group_name}"
        self._meetings = 0
        # Names of groups recur once a group is destroyed; what an earlier one left in the store must not be found.
        mine = dist.distributed_c10d._get_default_store().add("foremoe/control-planes", 1)
        number = self.gather(np.array([mine], dtype=np.int64), what="naming the control plane")[0, 0]
        self._store_key = f"{self._store_key}/{number}"

    def gather(self, values: npt.NDArray[Any], *, what: str) -> npt.NDArray[Any]:
        """`values` of every rank, stacked on a new first axis; shapes and dtypes must agree."""
        mine = torch.from_numpy(np.ascontiguousarray(values))
        if self.size == 1:
            return values[None].copy()
        out = torch.empty((self.size, *mine.shape), dtype=mine.dtype)
        with self.guard(what):
            dist.all_gather_single(out.view(-1), mine.reshape(-1), group=self.group)
        return out.numpy()

    def gather_objects(self, value: T, *, what: str) -> list[T]:
        """`value` of every rank, in rank order. Peers are trusted: the wire format is pickle."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        with self.guard(what):
            dist.all_gather_object(out, value, group=self.group)
        return out

    def exchange_objects(self, values: Sequence[T], *, what: str) -> list[T]:
        """Send `values[r]` to rank r; what the ranks sent to this one, in rank order."""
        if self.size == 1:
            return list(values)
        packed = [np.frombuffer(pickle.dumps(value, protocol=5), dtype=np.uint8) for value in values]
        sizes = self.gather(np.array([part.size for part in packed], dtype=np.int64), what=what)[:, self.rank]
        sent = torch.from_numpy(np.concatenate(packed))
        received = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        with self.guard(what):
            dist.all_to_all_single(
                received, sent, [int(n) for n in sizes], [part.size for part in packed], group=self.group
            )
        parts = np.split(received.numpy(), np.cumsum(sizes)[:-1])
        return [pickle.loads(part.tobytes()) for part in parts]

    def barrier(self, *, what: str) -> None:
        """Return when every rank has come here."""
        self.gather(np.zeros(1, dtype=np.int8), what=what)

    def meet(self, text: str, *, what: str) -> list[str]:
        """`text` of every rank, without a collective: for ranks whose peers may still be inside of one.

        Goes over the job's key-value store. Raises TransferError, within the timeout, naming who did not come.
        """
        if self.size == 1:
            return [text]
        self._meetings += 1
        keys = [f"{self._store_key}/meeting-{self._meetings}/{rank}" for rank in range(self.size)]
        store = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + (self.timeout or dist.distributed_c10d.default_pg_timeout).total_seconds()
        store.set(keys[self.rank], text)
        for rank, key in enumerate(keys):
            try:
                store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            except RuntimeError as error:
                raise TransferError(f"{what}: it did not come here within the timeout", rank=rank) from error
        return [store.get(key).decode() for key in keys]

    def agree(self, action: Callable[[], T], *, what: str) -> T:
        """Run `action` on every rank; if it fails on any, raise the first rank's error on all of them."""
        result: T | None = None
        failure: ForeMoEError | None = None
        try:
            result = action()
        except ForeMoEError as error:
            failure = error
            failure.__init__(  # type: ignore[misc]  # the same error, with the rank it happened on
                error.message,
                layer=error.layer,
                expert=error.expert,
                rank=self.rank if error.rank is None else error.rank,
            )
        failures = self.gather_objects(failure, what=what)
        for raised in failures:
            if raised is not None:
                raise raised
        return result  # type: ignore[return-value]  # set when nothing was raised

    @contextmanager
    def guard(self, what: str, *, layer: int | None = None) -> Iterator[None]:
        """Turn a failed collective into a TransferError that names the rank that is missing."""
        try:
            yield
        except ForeMoEError:
            raise
        except RuntimeError as error:
            missing, reason = self._missing_ranks()
            if missing:
                named = ", ".join(str(rank) for rank in missing)
                text = f"{what}: rank {named} of {self.size} died or stopped answering"
                raise TransferError(text, layer=layer, rank=missing[0]) from error
            raise TransferError(f"{what} failed although {reason}: {error}", layer=layer) from error

    def _missing_ranks(self) -> tuple[list[int], str]:
        """Ranks that did not sign in after a failure, and what is known if there is none."""
        store = dist.distributed_c10d._get_default_store()
        keys = [f"{self._store_key}/failed/{rank}" for rank in range(self.size)]
        missing = [rank for rank in range(self.size) if rank != self.rank]
        try:
            store.set(keys[self.rank], "here")
            deadline = time.monotonic() + _SIGN_IN_SECONDS
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if not store.check([keys[rank]])]
                if missing:
                    time.sleep(0.05)
        except RuntimeError:
            return [], "the store is gone too (the process that hosts it, rank 0 or the launcher, has ended)"
        return missing, "every rank is alive"
