"""From recorded expert ids to loads, and from loads to rank imbalance.

A rollout engine records, for every token it fed, the experts each layer chose. Not every row of that
record is real: the last sampled token of a response is never fed, padding samples and the tails of
multi-turn dialogues are not fed either. Engines fill such rows with zeros, so a row counts only when
its ids are distinct (a real top-k choice always is, for k >= 2). Rows a caller marks with -1 have no
record either. Counting filler as expert 0 leaves gradients right and loads wrong, silently.

With top_k = 1 a filler row looks like a choice of expert 0, so the caller must pass `mask_T`.

Shapes: T token, L layer, K top-k, E expert, S source rank, R rank, M micro-step.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foremoe.errors import RoutingError

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

# Up to this k comparing all pairs of columns beats sorting each row (28 comparisons at k = 8).
_PAIRWISE_TOP_K = 12


class HasHomes(Protocol):
    """What `rank_imbalance` needs of a base placement."""

    @property
    def home_E(self) -> npt.NDArray[np.int64]:
        """Home rank of every expert, int64 [E]."""
        ...

    @property
    def ranks(self) -> int:
        """Size of the EP group."""
        ...


def recorded_rows(routed_TLK: IntArray, *, experts: int) -> BoolArray:
    """Which (token, layer) rows hold a real choice: bool [T, L].

    A row is no record if an id is -1 or an id repeats. Raises RoutingError, naming the layer, for ids
    outside [-1, experts) and for arrays that are not integer [T, L, K].
    """
    _check_ids(routed_TLK, experts)
    top_k = routed_TLK.shape[2]
    recorded_TL: BoolArray = np.all(routed_TLK >= 0, axis=2)
    if top_k <= _PAIRWISE_TOP_K:
        for left in range(top_k):
            for right in range(left + 1, top_k):
                recorded_TL &= routed_TLK[:, :, left] != routed_TLK[:, :, right]
    else:
        ordered = np.sort(routed_TLK, axis=2)
        recorded_TL &= (ordered[:, :, 1:] != ordered[:, :, :-1]).all(axis=2)
    return recorded_TL


def count_experts(routed_TLK: IntArray, *, experts: int, mask_T: BoolArray | None = None) -> npt.NDArray[np.int64]:
    """Token-expert pairs per layer and expert: int64 [L, E].

    Only recorded rows count (see `recorded_rows`), and of those only the ones set in `mask_T`
    (bool [T] or [T, L]; None = all). Raises RoutingError for bad ids, shapes or masks.
    """
    recorded_TL = recorded_rows(routed_TLK, experts=experts)
    tokens, layers, _ = routed_TLK.shape
    if mask_T is not None:
        mask_T = np.asarray(mask_T)
        if mask_T.dtype != np.bool_ or mask_T.shape not in ((tokens,), (tokens, layers)):
            raise RoutingError(
                f"mask must be bool [{tokens}] or [{tokens}, {layers}], got {mask_T.dtype} {list(mask_T.shape)}"
            )
        recorded_TL = recorded_TL & (mask_T if mask_T.ndim == 2 else mask_T[:, None])
    load_LE = np.zeros((layers, experts), dtype=np.int64)
    for layer in range(layers):
        ids = routed_TLK[recorded_TL[:, layer], layer, :]
        load_LE[layer] = np.bincount(ids.ravel(), minlength=experts)
    return load_LE


def rank_loads(load_MLSE: IntArray, home_LE: npt.NDArray[np.int64], *, ranks: int) -> npt.NDArray[np.int64]:
    """Pairs each rank computes when every expert stays at its home: int64 [M, L, R].

    `home_LE` is int [L, E], or [E] for the same homes in every layer. Raises RoutingError when shapes
    disagree or a home is not in [0, ranks).
    """
    load_MLSE, homes = np.asarray(load_MLSE), np.asarray(home_LE)
    if load_MLSE.ndim != 4:
        raise RoutingError(f"load must be [M, L, S, E], got {load_MLSE.ndim} dimensions")
    micro_steps, layers, _, experts = load_MLSE.shape
    if homes.shape not in ((experts,), (layers, experts)):
        raise RoutingError(f"homes must be [{experts}] or [{layers}, {experts}], got {list(homes.shape)}")
    if experts and (homes.min() < 0 or homes.max() >= ranks):
        raise RoutingError(f"every home must be a rank in [0, {ranks})")
    homes = np.broadcast_to(homes, (layers, experts))
    load_MLE = load_MLSE.sum(axis=2, dtype=np.int64)
    load_MLR = np.zeros((micro_steps, layers, ranks), dtype=np.int64)
    for layer in range(layers):
        np.add.at(load_MLR[:, layer, :].T, homes[layer], load_MLE[:, layer, :].T)
    return load_MLR


def rank_imbalance(load_MLSE: IntArray, base: HasHomes) -> npt.NDArray[np.float64]:
    """Imbalance (max over mean of rank loads) under `base`: float64 [M, L]; 1.0 where nothing is routed."""
    load_MLR = rank_loads(load_MLSE, base.home_E, ranks=base.ranks)
    return imbalance(load_MLR)


def imbalance(load_R: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Max over mean along the last axis; 1.0 where the sum is zero."""
    mean = load_R.mean(axis=-1)
    peak = load_R.max(axis=-1)
    return np.where(mean > 0, peak / np.where(mean > 0, mean, 1.0), 1.0)


def _check_ids(routed_TLK: IntArray, experts: int) -> None:
    if experts < 1:
        raise RoutingError(f"experts must be at least 1, got {experts}")
    if routed_TLK.ndim != 3 or not np.issubdtype(routed_TLK.dtype, np.integer):
        raise RoutingError(
            f"routed experts must be integer [tokens, layers, top_k], got {routed_TLK.dtype} {list(routed_TLK.shape)}"
        )
    if routed_TLK.size == 0:
        return
    if routed_TLK.min() >= -1 and routed_TLK.max() < experts:
        return
    bad = np.argwhere((routed_TLK < -1) | (routed_TLK >= experts))[0]
    token, layer, choice = (int(i) for i in bad)
    raise RoutingError(
        f"token {token} names expert {int(routed_TLK[token, layer, choice])}, "
        f"but ids must be in [0, {experts}) or -1 for no record",
        layer=layer,
    )
