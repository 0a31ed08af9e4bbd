"""Memory that ranks of one node share: one file per rank, mapped by all, already unlinked.

A file in /dev/shm is mapped by its owner for writing and by the others for reading. It is unlinked as soon as every
peer has opened it, or one of them is found dead or without room, so a crash later on leaves nothing behind. Space is
reserved when the file is made: writing to a page that tmpfs cannot provide would kill the process with SIGBUS
(container runtimes give /dev/shm 64 MiB by default).

Which ranks share memory is found by trying: processes on one host may still live in containers with separate
/dev/shm. Pages are registered with CUDA where it exists, so copies to and from a GPU are asynchronous.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from foremoe.errors import TransferError
from foremoe.transfer.control import ControlPlane

__all__ = ["SharedRegion"]

_DIRECTORY = Path("/dev/shm")
_ALIGN = 64


class SharedRegion:
    """One writable region per rank of the group, readable by the ranks that can see it."""

    def __init__(self, control: ControlPlane) -> None:
        """Collective: finds out which ranks see each other's memory."""
        self._control = control
        self._capacity_R = [0] * control.size
        self._mapped: list[torch.Tensor | None] = [None] * control.size
        self.visible_RR: npt.NDArray[np.bool_] = np.ones((control.size, control.size), dtype=bool)
        seen = self._remap([_ALIGN] * control.size, list(range(control.size)))
        both_RR = np.stack(control.gather_objects(seen, what="looking for shared host memory"))
        self.visible_RR = both_RR & both_RR.T

    @staticmethod
    def padded(nbytes: int) -> int:
        """Bytes a tensor of `nbytes` takes here."""
        return -(-nbytes // _ALIGN) * _ALIGN

    def reserve(self, nbytes_R: Sequence[int]) -> None:
        """Make every rank's region at least this large; contents are lost where it grows.

        Collective, with equal arguments. Raises TransferError on every rank if one has no room.
        """
        grown = [rank for rank, size in enumerate(nbytes_R) if size > self._capacity_R[rank]]
        if grown:
            self._remap(nbytes_R, grown)

    def store(self, offset: int, tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors one after the other into this rank's region."""
        for tensor, place in zip(tensors, self._views(self._control.rank, offset, tensors), strict=True):
            place.copy_(tensor, non_blocking=True)

    def load(self, rank: int, offset: int, tensors: Sequence[torch.Tensor]) -> None:
        """Fill `tensors` from the region of `rank`."""
        for tensor, place in zip(tensors, self._views(rank, offset, tensors), strict=True):
            tensor.copy_(place, non_blocking=True)

    def own_bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """A part of this rank's region, uint8."""
        region = self._mapped[self._control.rank]
        assert region is not None  # made when the region was reserved
        return region[offset : offset + nbytes]

    def flush(self) -> None:
        """Return when copies to and from a GPU are done."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Drop all mappings."""
        self._mapped = [None] * self._control.size
        self._capacity_R = [0] * self._control.size

    def _views(self, rank: int, offset: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        region = self._mapped[rank]
        if region is None:
            raise TransferError("its host memory is not visible here", rank=rank)
        views = []
        for tensor in like:
            views.append(region[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            offset += self.padded(tensor.nbytes)
        return views

    def _remap(self, nbytes_R: Sequence[int], grown: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Replace the regions of `grown`; which of all ranks' regions this rank sees."""
        me = self._control.rank
        what = "sharing host memory"
        mine = _DIRECTORY / f"foremoe-{os.getpid()}-{secrets.token_hex(8)}" if me in grown else None
        # Names come first, files later: so every rank can remove what a peer made that is dead by now.
        paths = self._control.gather_objects(mine, what=what)
        try:
            self._control.agree(lambda: None if mine is None else self._create(mine, nbytes_R[me]), what=what)
            seen_R: npt.NDArray[np.bool_] = self.visible_RR[me].copy()
            for rank in grown:
                path = paths[rank]
                if rank != me and path is not None and seen_R[rank]:
                    self._mapped[rank] = _map(path, writable=False)
                    seen_R[rank] = self._mapped[rank] is not None
                self._capacity_R[rank] = nbytes_R[rank]
            self._control.barrier(what=what)
        finally:
            for path in paths:
                if path is not None:
                    path.unlink(missing_ok=True)
        return seen_R

    def _create(self, path: Path, nbytes: int) -> None:
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(handle, 0, max(nbytes, _ALIGN))
            finally:
                os.close(handle)
        except OSError as error:
            raise TransferError(
                f"no room for {nbytes} bytes of shared host memory in {_DIRECTORY}: {error.strerror}; enlarge it "
                "(a pod mounts an emptyDir with medium: Memory)"
            ) from error
        self._mapped[self._control.rank] = _map(path, writable=True)


def _map(path: Path, *, writable: bool) -> torch.Tensor | None:
    try:
        # Read-only memory cannot back a tensor without a warning; readers map it writable and never write.
        with path.open("r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
    except OSError:
        return None
    region = torch.frombuffer(mapping, dtype=torch.uint8)
    if torch.cuda.is_available() and writable:
        torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.numel(), 0)  # type: ignore[no-untyped-call]
    return region
