"""Each baseline has the properties its paper or code states."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from foremoe.planner import BasePlacement, PlannerConfig, StepPlan, Strategy, plan_step
from foremoe.planner.oracle import subset_bound
from foremoe.planner.strategies.eplb import pack_copies, replica_counts
from foremoe.planner.strategies.lplb import neighbour
from foremoe.routing.generator import Skew, TraceSpec, generate_layer
from foremoe.topology import Topology

RANKS, EXPERTS = 16, 64
TOPOLOGY = Topology.uniform(ranks=RANKS, ranks_per_node=8)
BASE = BasePlacement.contiguous(experts=EXPERTS, ranks=RANKS)


def loads(steps: int = 2) -> list[np.ndarray]:
    spec = TraceSpec(experts=EXPERTS, ranks=RANKS, micro_steps=6, skew=Skew.STRONG, tokens_per_rank=2048)
    return [generate_layer(spec, step=step, layer=0) for step in range(steps)]


def run(strategy: Strategy, steps: int = 2, **settings: object) -> list[StepPlan]:
    config = PlannerConfig.checked({"strategy": strategy, "searchMoves": 2000, **settings})
    plans: list[StepPlan] = []
    base = BASE
    for load in loads(steps):
        plan = plan_step(load, base=base, topology=TOPOLOGY, config=config, previous=plans[-1] if plans else None)
        plan.validate(load)
        plans.append(plan)
        base = plan.base
    return plans


def reference_eplb(weight: list[float], ranks: int, copies: int) -> list[list[int]]:
    """The published rule, written as plain loops over lists: slots of every rank."""
    count = [1] * len(weight)
    slots = list(range(len(weight)))
    while len(slots) < copies:
        best = 0
        for expert in range(len(weight)):
            if weight[expert] / count[expert] > weight[best] / count[best]:
                best = expert
        count[best] += 1
        slots.append(best)
    order = sorted(range(copies), key=lambda slot: -weight[slots[slot]] / count[slots[slot]])
    packs: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for slot in order:
        open_ranks = [rank for rank in range(ranks) if len(packs[rank]) < copies // ranks]
        rank = min(open_ranks, key=lambda rank: sums[rank])
        packs[rank].append(slots[slot])
        sums[rank] += weight[slots[slot]] / count[slots[slot]]
    return packs


@pytest.mark.parametrize("seed", range(20))
def test_eplb_counts_and_packs_as_published(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Distinct weights, so that ties cannot be broken in two ways.
    weight_E = rng.permutation(np.arange(1, 33) ** 2 + rng.integers(0, 3, 32)).astype(np.int64)
    count_E = replica_counts(weight_E, 16)
    packs = reference_eplb(weight_E.tolist(), 8, 48)
    assert count_E.tolist() == np.bincount([expert for pack in packs for expert in pack], minlength=32).tolist()
    count_RE = pack_copies(weight_E, count_E, np.full(8, 6))
    shares = weight_E / count_E
    np.testing.assert_allclose(np.sort(count_RE @ shares), np.sort([sum(shares[e] for e in pack) for pack in packs]))
    assert (count_RE.sum(axis=1) == 6).all()


def test_history_based_strategies_see_only_the_past() -> None:
    for strategy in (Strategy.EPLB, Strategy.LPLB):
        first, second = run(strategy)
        assert not first.replicas
        config = PlannerConfig(strategy=strategy)
        other = plan_step(loads()[1][::-1] * 2, base=BASE, topology=TOPOLOGY, config=config, previous=first)
        np.testing.assert_array_equal(other.hosts_RE, second.hosts_RE)


def test_eplb_rebalances_at_its_period() -> None:
    plans = run(Strategy.EPLB, steps=5, rebalanceSteps=2)
    same = [np.array_equal(a.hosts_RE, b.hosts_RE) for a, b in itertools.pairwise(plans[1:])]
    assert same == [True, False, True]


def test_eplb_splits_evenly() -> None:
    plan = run(Strategy.EPLB)[1].plans[0]
    copies = np.diff(plan.start_E1)
    for expert in np.flatnonzero(copies > 1):
        rows = plan.split_XS[plan.row_C[plan.start_E1[expert] : plan.start_E1[expert + 1]]]
        assert int((rows.max(axis=0) - rows.min(axis=0)).max()) <= 1


def test_lplb_copies_along_edges_and_splits_optimally() -> None:
    second = run(Strategy.LPLB, redundantSlots=2)[1]
    assert second.hosts_RE.sum(axis=0).max() <= 3
    for copy in second.replicas:
        assert BASE.home_E[copy.expert] in {neighbour(copy.rank, slot, RANKS) for slot in range(2)}
    for plan, load in zip(second.plans, loads()[1], strict=True):
        assert int(plan.rank_load_R.max()) == subset_bound(load.sum(axis=0), second.hosts_RE)


def test_relibra_replicates_inside_the_node_only() -> None:
    plan = run(Strategy.RELIBRA, maxMoves=None)[1]
    node_R = TOPOLOGY.node_R
    for micro in plan.plans:
        for copy in micro.copies:
            assert node_R[copy.rank] == node_R[plan.base.home_E[copy.expert]]
    assert not plan.replicas


def test_relibra_reordering_and_replication_beat_either_alone() -> None:
    both = run(Strategy.RELIBRA, maxMoves=None)[1]
    reorder = run(Strategy.RELIBRA, maxMoves=None, redundantSlots=0)[1]
    replicate = run(Strategy.RELIBRA, maxMoves=0)[1]
    static = run(Strategy.STATIC)[1]
    mean = {name: plan.imbalance_M.mean() for name, plan in
            {"both": both, "reorder": reorder, "replicate": replicate, "static": static}.items()}  # fmt: skip
    assert mean["both"] < mean["reorder"] < mean["static"]
    assert mean["both"] < mean["replicate"] < mean["static"]


def test_foremoe_needs_no_copies_and_is_best() -> None:
    best = run(Strategy.FOREMOE, maxMoves=None)[1]
    assert best.copies == 0
    for other in (Strategy.STATIC, Strategy.EPLB, Strategy.LPLB, Strategy.RELIBRA):
        assert best.modelled_seconds < run(other, maxMoves=None)[1].modelled_seconds


def test_static_ignores_slots() -> None:
    plan = run(Strategy.STATIC, redundantSlots=3, dynamicSlots=2)[0]
    assert not plan.replicas and plan.base == BASE
    np.testing.assert_array_equal(plan.plans[0].rank_load_R, loads()[0][0].sum(axis=0).reshape(RANKS, -1).sum(axis=1))
