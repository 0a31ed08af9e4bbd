"""How skewed and how restless a trace is: the figures that tell whether synthetic traces resemble real ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foremoe.errors import RoutingError
from foremoe.routing.counting import IntArray, imbalance


@dataclass(frozen=True, kw_only=True)
class LoadStatistics:
    """Skew of one layer and step, without any balancing."""

    step_gini: float
    """Gini coefficient of the experts' loads over the step; 0 is even."""
    step_expert_imbalance: float
    """Max over mean of the experts' loads, over the step."""
    micro_expert_imbalance: float
    """The same in a micro-step, on average."""
    rank_imbalance: float
    """Max over mean of the ranks' loads in a micro-step with contiguous homes, on average."""
    rank_imbalance_p95: float
    micro_correlation: float
    """Correlation of the experts' loads from one micro-step to the next, on average; nan for one micro-step."""


def load_statistics(load_MSE: IntArray, *, ranks: int) -> LoadStatistics:
    """Statistics of one layer and step for `ranks` ranks; raises RoutingError if experts do not divide over them."""
    load_ME = np.asarray(load_MSE).sum(axis=1, dtype=np.int64)
    micro_steps, experts = load_ME.shape
    if ranks < 1 or experts % ranks:
        raise RoutingError(f"{experts} experts do not divide over {ranks} ranks")
    load_MR = load_ME.reshape(micro_steps, ranks, experts // ranks).sum(axis=2)
    rank_M = imbalance(load_MR)
    step_E = np.sort(load_ME.sum(axis=0)).astype(np.float64)
    total = step_E.sum()
    gini = 1 + 1 / experts - 2 * np.cumsum(step_E).sum() / (total * experts) if total else 0.0
    pairs = [
        np.corrcoef(load_ME[m], load_ME[m + 1])[0, 1]
        for m in range(micro_steps - 1)
        if load_ME[m].std() > 0 and load_ME[m + 1].std() > 0
    ]
    return LoadStatistics(
        step_gini=float(gini),
        step_expert_imbalance=float(imbalance(load_ME.sum(axis=0))),
        micro_expert_imbalance=float(imbalance(load_ME).mean()),
        rank_imbalance=float(rank_M.mean()),
        rank_imbalance_p95=float(np.quantile(rank_M, 0.95)),
        micro_correlation=float(np.mean(pairs)) if pairs else float("nan"),
    )
