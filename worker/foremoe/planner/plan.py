"""Plans: where every token of a layer and micro-step is computed, as exact integers.

A plan keeps the copies of all experts, the quota (tokens) of each copy, and, for experts with
several copies, which source's tokens go to which copy. Dense arrays are made on request. Everything in it
can be checked from outside: `validate` recomputes loads, hosts and slots from the dense split.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foremoe.errors import PlannerError
from foremoe.planner._split import dense_tokens, group_traffic
from foremoe.planner.base import BasePlacement
from foremoe.topology import Topology

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Copy(NamedTuple):
    """A replica that must be brought to a rank before the layer runs."""

    expert: int
    rank: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Hosts and assignment of one layer and micro-step."""

    load_SE: Ints
    """The load it was made for, int64 [S, E]."""
    home_E: Ints
    start_E1: Ints
    """Copies of expert e are start_E1[e]:start_E1[e + 1], by rank."""
    host_C: Ints
    quota_C: Ints
    """Tokens each copy computes."""
    row_C: Ints
    """Row of a copy in `split_XS`; -1 for the only copy of an expert."""
    split_XS: Ints
    """Tokens of every source on the copies of experts with several copies."""
    rank_load_R: Ints
    """Pairs every rank computes, int64 [R]."""
    capacity_R: Ints
    """Most experts a rank may host, home experts included."""
    present_RE: Bools | None = None
    """Copies that are in place already; None = the homes."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.rank_load_R.size)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return int(self.start_E1.size - 1)

    @cached_property
    def expert_C(self) -> Ints:
        """Expert of every copy."""
        return np.repeat(np.arange(self.experts), np.diff(self.start_E1))

    @cached_property
    def hosts_RE(self) -> Bools:
        """Which rank holds a copy of which expert, homes included: bool [R, E]."""
        hosts = np.zeros((self.ranks, self.experts), dtype=np.bool_)
        hosts[self.host_C, self.expert_C] = True
        return hosts

    @property
    def imbalance(self) -> float:
        """Max over mean of the rank loads; 1.0 if there is nothing to compute."""
        total = int(self.rank_load_R.sum())
        return int(self.rank_load_R.max()) * self.ranks / total if total else 1.0

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """Replicas that are not there yet and get tokens, by expert, then rank."""
        away = (self.host_C != self.home_E[self.expert_C]) & (self.quota_C > 0)
        if self.present_RE is not None:
            away &= ~self.present_RE[self.host_C, self.expert_C]
        chosen = np.flatnonzero(away)
        return tuple(
            Copy(int(expert), int(rank))
            for expert, rank in zip(self.expert_C[chosen], self.host_C[chosen], strict=True)
        )

    def tokens_SER(self) -> Ints:
        """Tokens of source s and expert e that rank r computes, dense and exact: int64 [S, E, R]."""
        tokens = np.zeros((self.load_SE.shape[0], self.experts, self.ranks), dtype=np.int64)
        dense_tokens(self.load_SE, self.start_E1, self.host_C, self.row_C, self.split_XS, tokens)
        return tokens

    def tokens_ER(self, source: int) -> Ints:
        """Tokens of one source: int64 [E, R]."""
        tokens = np.zeros((self.experts, self.ranks), dtype=np.int64)
        only = self.row_C < 0
        expert_C = self.expert_C
        tokens[expert_C[only], self.host_C[only]] = self.load_SE[source, expert_C[only]]
        tokens[expert_C[~only], self.host_C[~only]] = self.split_XS[self.row_C[~only], source]
        return tokens

    def traffic_GG(self, group_R: Ints) -> Ints:
        """Pairs from every group of source ranks to every group of computing ranks: int64 [G, G].

        `group_R` is `topology.node_R`, `topology.domain_R`, or `arange(R)` for single ranks.
        """
        groups = int(group_R.max()) + 1
        return group_traffic(self.load_SE, self.start_E1, self.host_C, self.row_C, self.split_XS, group_R, groups)

    def crossing(self, group_R: Ints) -> int:
        """Pairs computed outside the group they come from."""
        pairs_GG = self.traffic_GG(group_R)
        return int(pairs_GG.sum() - np.trace(pairs_GG))

    def validate(self, load_SE: npt.ArrayLike | None = None) -> None:
        """Recompute everything from the dense split; raises PlannerError naming expert or rank at fault."""
        load = self.load_SE if load_SE is None else np.asarray(load_SE)
        if load.shape != self.load_SE.shape:
            raise PlannerError(f"the plan is for loads {list(self.load_SE.shape)}, not {list(load.shape)}")
        tokens = self.tokens_SER()
        if (tokens < 0).any():
            raise PlannerError("negative token counts", expert=int(np.argwhere(tokens < 0)[0][1]))
        lost = np.argwhere(tokens.sum(axis=2) != load)
        if lost.size:
            raise PlannerError("tokens lost or invented", rank=int(lost[0][0]), expert=int(lost[0][1]))
        tokens_ER = tokens.sum(axis=0)
        hosts = self.hosts_RE
        homeless = np.flatnonzero(~hosts.any(axis=0))
        if homeless.size:
            raise PlannerError("expert without a host", expert=int(homeless[0]))
        stray = np.argwhere((tokens_ER.T > 0) & ~hosts)
        if stray.size:
            raise PlannerError(
                "tokens sent to a rank without the expert", rank=int(stray[0][0]), expert=int(stray[0][1])
            )
        if np.bincount(self.expert_C * self.ranks + self.host_C).max(initial=0) > 1:
            raise PlannerError("two copies of one expert on one rank")
        over = np.flatnonzero(hosts.sum(axis=1) > self.capacity_R)
        if over.size:
            raise PlannerError(
                f"{hosts[over[0]].sum()} experts hosted, room for {self.capacity_R[over[0]]}", rank=int(over[0])
            )
        wrong = np.flatnonzero(tokens_ER.sum(axis=0) != self.rank_load_R)
        if wrong.size:
            raise PlannerError("rank load does not match the split", rank=int(wrong[0]))
        if (tokens_ER[self.expert_C, self.host_C] != self.quota_C).any():
            raise PlannerError("quotas do not match the split")


@dataclass(frozen=True, eq=False, kw_only=True)
class StepPlan:
    """Plans of one layer for all micro-steps of a step."""

    base: BasePlacement
    """Homes in force during the step; `moves` are to be made before it."""
    hosts_RE: Bools
    """Homes and step replicas, bool [R, E]."""
    plans: tuple[Plan, ...]
    """One per micro-step."""
    chosen: str
    """Name of the candidate that was cheapest."""
    modelled_seconds: float
    """Its modelled time for this layer over all micro-steps."""
    moves: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Experts whose home changes against the base passed in, ascending."""
    history_HE: Ints | None = None
    """Loads of the last steps, newest first, for strategies that look back: int64 [H, E]."""
    age_steps: int = 0
    """Steps since a history-based strategy last placed its replicas."""

    @property
    def replicas(self) -> tuple[Copy, ...]:
        """All step replicas, by expert, then rank."""
        rank, expert = np.nonzero(self.hosts_RE)
        away = self.base.home_E[expert] != rank
        order = np.lexsort((rank[away], expert[away]))
        return tuple(Copy(int(expert[away][i]), int(rank[away][i])) for i in order)

    @property
    def imbalance_M(self) -> npt.NDArray[np.float64]:
        """Max over mean of every micro-step: float64 [M]."""
        return np.array([plan.imbalance for plan in self.plans])

    @property
    def copies(self) -> int:
        """Replicas brought within micro-steps, in total."""
        return sum(len(plan.copies) for plan in self.plans)

    def validate(self, load_MSE: npt.ArrayLike) -> None:
        """Validate every micro-step's plan and that step hosts are part of it."""
        load = np.asarray(load_MSE)
        if load.shape[0] != len(self.plans):
            raise PlannerError(f"{len(self.plans)} plans for {load.shape[0]} micro-steps")
        for plan, load_SE in zip(self.plans, load, strict=True):
            plan.validate(load_SE)
            if (self.hosts_RE & ~plan.hosts_RE).any():
                raise PlannerError("a micro-step's plan lacks a step replica")


def traffic_of(plan: Plan, topology: Topology) -> tuple[int, int]:
    """(pairs that leave their domain, pairs through the busiest domain's network links, larger direction)."""
    pairs_GG = plan.traffic_GG(topology.domain_R)
    inside = np.diag(pairs_GG)
    out_G, in_G = pairs_GG.sum(axis=1) - inside, pairs_GG.sum(axis=0) - inside
    return int(out_G.sum()), int(max(out_G.max(), in_G.max()))
