"""From a micro-batch's record to one row per token that the MoE layers really see.

veRL feeds samples packed one after the other (`use_remove_padding`), optionally padded at the end and cut over
sequence-parallel ranks, or as a right-padded rectangle. Each row is one of three kinds, for all layers alike: recorded
(replayed), needed but not recorded (routed live), and not needed. The last kind are padding, the last sampled token,
tails and padding samples: no trained-on prediction depends on them, so no expert computes them and no plan counts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foremoe.moe import NO_RECORD, SKIP
from foremoe.verl.rows import real_rows, response_masks, sample_lengths

__all__ = ["Layout", "layer_rows"]


class Layout:
    """How the engine lays out the tokens of a micro-batch."""

    def __init__(self, *, packed: bool, bucket: int = 1, parts: int = 1, part: int = 0) -> None:
        """`packed`: samples one after the other. `bucket`: packed tokens are padded to its multiple. `parts`, `part`:
        sequence-parallel ranks, and which of them this is.
        """
        self._packed = packed
        self._bucket = bucket
        self._parts = parts
        self._part = part

    def place(self, rows: npt.NDArray[np.int16], lengths: list[int]) -> npt.NDArray[np.int16]:
        """Rows of all samples, one after the other, in the places where the model sees them; gaps are SKIP."""
        if not self._packed:
            placed = np.full((len(lengths), max(lengths), *rows.shape[1:]), SKIP, dtype=rows.dtype)
            start = 0
            for sample, length in enumerate(lengths):
                placed[sample, :length] = rows[start : start + length]
                start += length
            return placed.reshape(-1, *rows.shape[1:])
        total = -(-rows.shape[0] // self._bucket) * self._bucket
        total = -(-total // self._parts) * self._parts
        padding = np.full((total - rows.shape[0], *rows.shape[1:]), SKIP, dtype=rows.dtype)
        share = total // self._parts
        return np.concatenate([rows, padding])[self._part * share : (self._part + 1) * share]


def layer_rows(
    micro_batch: Any, routes: npt.NDArray[np.int16] | None, *, layers: int, top_k: int, layout: Layout
) -> torch.Tensor:
    """Expert ids int16 [rows the MoE layers see, MoE layers, top_k]; NO_RECORD is routed live, SKIP is not computed."""
    lengths = sample_lengths(micro_batch["input_ids"])
    shape = (sum(lengths), layers, top_k)
    rows = np.full(shape, NO_RECORD, dtype=np.int16) if routes is None else routes.copy()
    mask = micro_batch.get("response_mask", None)
    if mask is not None:
        rows[~real_rows(lengths, response_masks(mask, lengths))] = SKIP
    return torch.from_numpy(layout.place(rows, lengths))
