"""A second look at a micro-step whose dynamic replicas leave too much: the search for step replicas, on one micro-step.

The greedy replicas of `dynamic_plan` take microseconds and are nearly always within a per cent of balance. Where ranks
have many home experts and few slots it sometimes ends further off; then a few thousand tries of the search, some
milliseconds, start from its replicas.
"""

from __future__ import annotations

import numpy as np

from foremoe.planner._assign import assign_plan, layout_from_hosts
from foremoe.planner._search import Aim, search_slots
from foremoe.planner.base import BasePlacement
from foremoe.planner.plan import Ints, Plan
from foremoe.planner.replicas import hosts_of
from foremoe.topology import Topology

COARSE = 0.01
"""Imbalance above the tolerance from which the search is worth its milliseconds."""
_CLOSE = 0.003
_TRIES = 4000
_HEAT = 0.05


def polished(plan: Plan, *, topology: Topology, slots_R: Ints, tolerance: float, seed: int) -> Plan:
    """The plan, or a better balanced one with other replicas in `slots_R` slots a rank.

    All hosts of the plan but the homes are taken as replaceable.
    """
    home_E = np.ascontiguousarray(plan.home_E)
    load_ME = plan.load_SE.sum(axis=0)[None, :]
    total = int(load_ME.sum())
    start_RK = np.full((plan.ranks, int(slots_R.max())), -1, dtype=np.int64)
    for rank in range(plan.ranks):
        extra = np.flatnonzero(plan.hosts_RE[rank] & (home_E != rank))
        start_RK[rank, : extra.size] = extra
    aim = Aim(
        home_E=home_E,
        max_moves=0,
        slots_R=slots_R,
        slots=int(slots_R.max()),
        group_R=topology.locality.inner_R,
        local_EG=np.zeros((plan.experts, int(topology.locality.inner_R.max()) + 1), dtype=np.int64),
    )
    cap_M = np.ceil(load_ME.sum(axis=1) * (1 + max(tolerance, _CLOSE)) / plan.ranks).astype(np.int64)
    slot_RK, _, _, _ = search_slots(aim, home_E, load_ME, cap_M, start_RK, _TRIES, 1, _HEAT * total / plan.ranks, seed)
    hosts_RE = hosts_of(BasePlacement(home_E=home_E, ranks=plan.ranks), slot_RK)
    other = assign_plan(
        plan.load_SE,
        layout_from_hosts(hosts_RE),
        home_E=plan.home_E,
        topology=topology,
        capacity_R=plan.capacity_R,
        present_RE=plan.present_RE,
    )
    return other if other.imbalance < plan.imbalance else plan
