"""Which rows of a micro-batch count, and what they chose.

veRL carries the rollout's record as one jagged `[tokens, decoder layers, top_k]` per sample and fills it up with zeros.
Row t of a sample feeds token t and predicts token t+1. Only rows up to the last one whose prediction is trained on are
real: after it come the last sampled token, which the rollout never fed, the tail of a dialogue, or a whole sample that
was added for padding. Zeros there would count as expert 0, so such rows become -1, "no record".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from foremoe.errors import RoutingError

NO_RECORD = -1


def recorded_routes(micro_batch: Any, *, moe_layers: list[int]) -> npt.NDArray[np.int16] | None:
    """Chosen experts of every fed token of a micro-batch: int16 [tokens, moe layers, top_k], -1 where none is recorded.

    Tokens are in the batch's own order, samples one after the other, without padding columns. None if the batch carries
    no record. Raises RoutingError if record and tokens disagree in length or layers.
    """
    record = micro_batch.get("routed_experts", None)
    if record is None:
        return None
    lengths = sample_lengths(micro_batch["input_ids"])
    routes = flat_rows(record, lengths)
    if routes.shape[0] != sum(lengths):
        raise RoutingError(f"the record has {routes.shape[0]} rows for {sum(lengths)} tokens")
    if moe_layers and moe_layers[-1] >= routes.shape[1]:
        raise RoutingError(
            f"the record has {routes.shape[1]} layers, the model has experts in layer {moe_layers[-1]}",
            layer=moe_layers[-1],
        )
    chosen = routes[:, moe_layers].to(torch.int16).cpu().numpy()
    real = real_rows(lengths, response_masks(micro_batch["response_mask"], lengths))
    chosen[~real] = NO_RECORD
    return chosen


def sample_lengths(input_ids: torch.Tensor) -> list[int]:
    """Tokens of each sample of a jagged batch."""
    lengths: list[int] = input_ids.offsets().diff().tolist()  # type: ignore[attr-defined]
    return lengths


def flat_rows(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Rows of a jagged or right-padded batch, samples one after the other."""
    if values.is_nested:
        flat: torch.Tensor = values.values()
        return flat
    return torch.cat([values[sample, :length] for sample, length in enumerate(lengths)])


def response_masks(response_mask: torch.Tensor, lengths: list[int]) -> list[npt.NDArray[np.bool_]]:
    """Of each sample, which tokens of its response are trained on."""
    if response_mask.is_nested:
        rows = response_mask.unbind()
    else:
        rows = tuple(response_mask[sample] for sample in range(len(lengths)))
    return [row.bool().cpu().numpy() for row in rows]


def real_rows(lengths: list[int], masks: list[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """Rows that a trained-on prediction depends on: bool [tokens].

    `masks` cover the response, the last tokens of each sample; a padded mask may be longer than the response.
    """
    rows = np.zeros(sum(lengths), dtype=np.bool_)
    start = 0
    for length, mask in zip(lengths, masks, strict=True):
        trained = np.flatnonzero(mask)
        if trained.size:
            # Response token j sits at position length - len(response) + j and is predicted one row earlier.
            last = length - mask.size + int(trained[-1])
            rows[start : start + last] = True
        start += length
    return rows
