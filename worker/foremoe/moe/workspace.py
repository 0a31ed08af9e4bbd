"""Row buffers of the MoE layers, so that a layer call allocates next to nothing.

How many rows the largest call of a step has is known when it is planned. Buffers are made at that size where they are
first needed and then go from call to call. Two kinds: *scratch*, valid until the same name is taken again, and *kept*
rows, which autograd holds from forward to backward. A kept buffer is free when nothing refers to its storage any more,
however that came about: after backward, after a forward without gradients, after an exception, or much later if
somebody retains the graph.

Kept buffers are dropped when the step ends; between steps their memory is the allocator's.
"""

from __future__ import annotations

from collections import deque

import torch

__all__ = ["Workspace"]

# A tensor and the handle by which it is asked.
_OWN_REFERENCES = 2

_Key = tuple[str, torch.dtype, torch.device, bool]


class Workspace:
    """Buffers that all layers of one model share."""

    def __init__(self) -> None:
        self._rows = 0
        self._scratch: dict[_Key, torch.Tensor] = {}
        self._kept: dict[_Key, deque[torch.Tensor]] = {}

    def open_step(self, rows: int) -> None:
        """`rows`: the largest number of rows that a planned call sends or receives."""
        self._rows = rows

    def close_step(self) -> None:
        """Drop the kept buffers; those still referred to live on."""
        self._rows = 0
        self._kept.clear()

    def take(self, name: str, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """A [rows, width] buffer of `like`'s dtype and device; valid until the same name is taken again."""
        key = _key(name, like)
        buffer = self._scratch.get(key)
        if buffer is None or buffer.numel() < rows * width:
            buffer = like.new_empty(max(rows, self._rows) * width)
            self._scratch[key] = buffer
        return buffer[: rows * width].view(rows, width)

    def keep(self, rows: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """A [rows, width] buffer of `like`'s dtype and device; the caller's for as long as it refers to it."""
        if rows > self._rows:
            return like.new_empty((rows, width))
        buffers = self._kept.setdefault(_key(str(width), like), deque())
        # The one handed out longest ago comes first; in a regular step it is free.
        for _ in range(len(buffers)):
            buffer = buffers.popleft()
            buffers.append(buffer)
            if _is_free(buffer):
                return buffer[: rows * width].view(rows, width)
        buffer = like.new_empty(self._rows * width)
        buffers.append(buffer)
        return buffer[: rows * width].view(rows, width)


def _key(name: str, like: torch.Tensor) -> _Key:
    # What was made in inference mode cannot be used outside of it.
    return name, like.dtype, like.device, torch.is_inference_mode_enabled()


def _is_free(buffer: torch.Tensor) -> bool:
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= _OWN_REFERENCES
