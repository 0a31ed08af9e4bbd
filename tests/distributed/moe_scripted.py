"""A planner for tests of the runtime: uses every slot it is given, splits evenly, and compiles nothing.

What the real planner finds worth its price is its own business and tested elsewhere; here replicas must exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.planner import BasePlacement


@dataclass(frozen=True)
class EvenPlan:
    load_SE: Any
    hosts_RE: Any

    def tokens_SER(self) -> Any:
        """Every source's tokens of an expert spread over its hosts, the first ones taking the remainder."""
        hosts = self.hosts_RE.sum(axis=0)
        share_SE, rest_SE = np.divmod(self.load_SE, hosts)
        place_RE = np.where(self.hosts_RE, self.hosts_RE.cumsum(axis=0) - 1, -1)
        tokens = share_SE[:, :, None] + (place_RE.T[None] < rest_SE[:, :, None])
        return np.where(self.hosts_RE.T[None], tokens, 0)


@dataclass(frozen=True)
class EvenStepPlan:
    base: Any
    hosts_RE: Any
    plans: Any


def plan_evenly(load_MSE: Any, *, base: Any, topology: Any, config: Any, previous: Any = None) -> EvenStepPlan:
    """Replicas of the busiest experts that are not at home there, on every rank, until its slots are full.

    If homes may move, the busiest experts are dealt out to the ranks in turn.
    """
    del topology, previous
    if config.max_moves != 0:
        home_E = np.empty(base.experts, dtype=np.int64)
        home_E[np.argsort(-load_MSE.sum(axis=(0, 1)), kind="stable")] = np.arange(base.experts) % base.ranks
        base = BasePlacement(home_E=home_E, ranks=base.ranks)
    home_RE = base.home_E[None] == np.arange(base.ranks)[:, None]
    if config.strategy == "static":
        return EvenStepPlan(base, home_RE, tuple(EvenPlan(load_SE, home_RE) for load_SE in load_MSE))
    step_RE = with_busiest(home_RE, load_MSE.sum(axis=(0, 1)), config.redundant_slots)
    plans = tuple(
        EvenPlan(load_SE, with_busiest(step_RE, load_SE.sum(axis=0), config.dynamic_slots)) for load_SE in load_MSE
    )
    return EvenStepPlan(base, step_RE, plans)


def with_busiest(hosts_RE: Any, load_E: Any, slots: int) -> Any:
    hosts = hosts_RE.copy()
    for rank in range(hosts.shape[0]):
        absent = np.flatnonzero(~hosts[rank])
        hosts[rank, absent[np.argsort(-load_E[absent], kind="stable")][:slots]] = True
    return hosts
