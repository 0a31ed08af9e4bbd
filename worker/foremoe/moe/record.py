"""The recorded routing of one step on this rank: checked, classified, counted.

Every row of a record says for one token and layer which experts the rollout chose. Three kinds of rows exist:
*recorded* (distinct ids in range: replayed and planned), *live* (no record: -1, or ids that repeat, which is how
rollout engines fill rows they never computed) and *skipped* (`SKIP`: the caller knows that nothing it uses depends on
this token's routed experts, so none computes it). Ids outside the range are neither; they mean that record and model do
not belong together, and are an error that names layer, expert and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from foremoe.errors import RoutingError
from foremoe.routing import recorded_rows

__all__ = ["NO_RECORD", "SKIP", "MicroRecord", "check_records"]

NO_RECORD = -1
"""Expert id of a row without a record: the live router decides."""
SKIP = -2
"""Expert id of a row that no routed expert needs to compute; its MoE output is zero."""


@dataclass(frozen=True, kw_only=True)
class MicroRecord:
    """One micro-step's record of this rank."""

    ids_LTK: torch.Tensor
    """int64, on the host; rows of live tokens hold NO_RECORD, rows of skipped ones SKIP."""
    load_LE: npt.NDArray[np.int64]
    """Recorded pairs."""
    live_rows_L: npt.NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """Rows of the record."""
        return int(self.ids_LTK.shape[1])


def check_records(
    routing: Sequence[torch.Tensor], *, moe_layers: Sequence[int], decoder_layers: int, top_k: int, experts: int
) -> list[MicroRecord]:
    """Check and count the records of this rank's micro-steps.

    `moe_layers`: decoder index of every MoE layer. A record may cover the MoE layers only, or all decoder layers (as
    rollout engines write it); rows of dense layers are then dropped. Raises RoutingError.
    """
    return [
        _check_one(index, record, moe_layers=moe_layers, decoder_layers=decoder_layers, top_k=top_k, experts=experts)
        for index, record in enumerate(routing)
    ]


def _check_one(
    micro_step: int,
    record: torch.Tensor,
    *,
    moe_layers: Sequence[int],
    decoder_layers: int,
    top_k: int,
    experts: int,
) -> MicroRecord:
    where = f"routing of micro-step {micro_step}"
    if not isinstance(record, torch.Tensor):
        raise RoutingError(f"{where} must be a tensor, got {type(record).__name__}")
    if record.ndim != 3 or record.is_floating_point() or record.is_complex() or record.dtype == torch.bool:
        raise RoutingError(f"{where} must be integer [tokens, layers, top_k], got {record.dtype} {list(record.shape)}")
    _, layers, choices = record.shape
    if choices != top_k:
        raise RoutingError(f"{where} has {choices} experts per token, the model routes to {top_k}")
    if layers not in (len(moe_layers), decoder_layers):
        raise RoutingError(
            f"{where} has {layers} layers; the model has {len(moe_layers)} MoE layers among {decoder_layers}"
        )
    # Ids are small; int64 is what torch indexes with. Narrow unsigned types cannot hold the markers and need no care.
    ids_TLK = record.detach().to("cpu", torch.int64).numpy()
    if layers != len(moe_layers):
        ids_TLK = ids_TLK[:, list(moe_layers)]
    return _classified(micro_step, ids_TLK, experts)


def _classified(micro_step: int, ids_TLK: npt.NDArray[np.int64], experts: int) -> MicroRecord:
    bad = np.argwhere((ids_TLK < SKIP) | (ids_TLK >= experts))
    if bad.size:
        token, layer, choice = (int(i) for i in bad[0])
        expert = int(ids_TLK[token, layer, choice])
        raise RoutingError(
            f"micro-step {micro_step}, token {token}: ids must be in [0, {experts}), {NO_RECORD} for no record or "
            f"{SKIP} to skip",
            layer=layer,
            expert=expert,
        )
    skipped_TL = (ids_TLK == SKIP).any(axis=2)
    recorded_TL = recorded_rows(np.maximum(ids_TLK, NO_RECORD), experts=experts) & ~skipped_TL
    marked_TLK = np.where(recorded_TL[..., None], ids_TLK, NO_RECORD)
    marked_TLK[skipped_TL] = SKIP
    load_LE = np.stack(
        [
            np.bincount(marked_TLK[recorded_TL[:, layer], layer].ravel(), minlength=experts)
            for layer in range(ids_TLK.shape[1])
        ]
    ).astype(np.int64)
    return MicroRecord(
        ids_LTK=torch.from_numpy(np.ascontiguousarray(marked_TLK.transpose(1, 0, 2))),
        load_LE=load_LE,
        live_rows_L=(~recorded_TL & ~skipped_TL).sum(axis=0),
    )
