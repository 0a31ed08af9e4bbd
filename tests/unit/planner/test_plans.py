"""Whatever the input, plans are valid, deterministic and never modelled slower than no plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner.problems import random_load, random_topology

from foremoe.planner import BasePlacement, PlannerConfig, Strategy, optimize_base, plan_micro_step, plan_step
from foremoe.planner.cost import CostConstants, Gpu
from foremoe.planner.problem import StepProblem
from foremoe.planner.slots import replica_bytes
from foremoe.routing.generator import TraceSpec, generate_layer
from foremoe.topology import Topology


def make(
    seed: int, ranks: int, per_rank: int, micro_steps: int, tail: float
) -> tuple[np.ndarray, BasePlacement, Topology]:
    rng = np.random.default_rng(seed)
    experts = ranks * per_rank
    load = np.stack(
        [
            random_load(rng, ranks, experts, tail=tail, scale=float(rng.choice([0.2, 30, 3000])))
            for _ in range(micro_steps)
        ]
    )
    homes = rng.permutation(np.repeat(np.arange(ranks), per_rank))
    return load, BasePlacement(home_E=homes, ranks=ranks), random_topology(rng, ranks)


@given(
    seed=st.integers(0, 2**20),
    ranks=st.integers(1, 64),
    per_rank=st.integers(1, 8),
    tail=st.floats(0, 3),
    strategy=st.sampled_from(list(Strategy)),
    redundant=st.integers(0, 3),
    dynamic=st.integers(0, 2),
    max_moves=st.sampled_from([0, 2, None]),
    tolerance=st.sampled_from([0.0, 0.03]),
)
@settings(max_examples=60)
def test_step_plans_are_valid(
    seed: int,
    ranks: int,
    per_rank: int,
    tail: float,
    strategy: Strategy,
    redundant: int,
    dynamic: int,
    max_moves: int | None,
    tolerance: float,
) -> None:
    load, base, topology = make(seed, ranks, per_rank, 3, tail)
    config = PlannerConfig(
        strategy=strategy, redundant_slots=redundant, dynamic_slots=dynamic, max_moves=max_moves, tolerance=tolerance,
        search_moves=200,
    )  # fmt: skip
    first = plan_step(load, base=base, topology=topology, config=config)
    first.validate(load)
    second = plan_step(load[::-1], base=first.base, topology=topology, config=config, previous=first)
    second.validate(load[::-1])
    if max_moves is not None:
        assert first.moves.size <= max_moves


def test_ten_thousand_cases_lose_no_token() -> None:
    rng = np.random.default_rng(2026)
    for case in range(10_000):
        ranks = int(rng.integers(1, 9)) if case % 50 else int(rng.integers(9, 65))
        per_rank = int(rng.integers(1, 5)) if case % 50 else int(rng.integers(1, 9))
        experts = ranks * per_rank
        topology = _TOPOLOGIES[ranks]
        load = random_load(rng, ranks, experts, tail=float(rng.uniform(0, 3)), scale=float(rng.choice([0.1, 5, 800])))
        config = _CONFIGS[case % len(_CONFIGS)]
        plan = plan_micro_step(load, base=_BASES[ranks, per_rank], topology=topology, config=config)
        tokens = plan.tokens_SER()
        assert (tokens.sum(axis=2) == load).all() and (tokens >= 0).all()
        assert (tokens.sum(axis=(0, 1)) == plan.rank_load_R).all()
        assert (plan.hosts_RE.sum(axis=1) <= plan.capacity_R).all()
        assert plan.imbalance <= _static_imbalance(load, _BASES[ranks, per_rank]) + 1e-12
        if case % 20 == 0:
            plan.validate(load)


_TOPOLOGIES = {
    ranks: Topology.uniform(ranks=ranks, ranks_per_node=4 if ranks % 4 == 0 else ranks) for ranks in range(1, 65)
}
_BASES = {
    (ranks, per): BasePlacement.contiguous(experts=ranks * per, ranks=ranks)
    for ranks in range(1, 65)
    for per in range(1, 9)
}
_CONFIGS = [
    PlannerConfig(dynamic_slots=2),
    PlannerConfig(dynamic_slots=1, tolerance=0.03),
    PlannerConfig(dynamic_slots=3, min_tokens_per_replica=20),
    PlannerConfig(strategy=Strategy.RELIBRA, dynamic_slots=1),
]


def _static_imbalance(load: np.ndarray, base: BasePlacement) -> float:
    ranks = np.bincount(base.home_E, weights=load.sum(axis=0), minlength=base.ranks)
    return float(ranks.max() / ranks.mean()) if ranks.sum() else 1.0


def test_equal_calls_give_equal_plans() -> None:
    load, base, topology = make(1, 16, 4, 4, 1.0)
    config = PlannerConfig(max_moves=None, dynamic_slots=1, search_moves=2000)
    one, two = (plan_step(load, base=base, topology=topology, config=config) for _ in range(2))
    np.testing.assert_array_equal(one.hosts_RE, two.hosts_RE)
    for left, right in zip(one.plans, two.plans, strict=True):
        np.testing.assert_array_equal(left.tokens_SER(), right.tokens_SER())


def test_never_modelled_slower_than_doing_nothing() -> None:
    for seed in range(20):
        load, base, topology = make(seed, 8, 4, 3, float(seed % 4))
        slow = plan_step(load, base=base, topology=topology, config=PlannerConfig(strategy="static"))
        plan = plan_step(
            load, base=base, topology=topology, config=PlannerConfig(max_moves=None, dynamic_slots=1, search_moves=500)
        )
        assert plan.modelled_seconds <= slow.modelled_seconds * (1 + 1e-12)


def test_balanced_load_is_left_alone() -> None:
    topology = Topology.uniform(ranks=4, ranks_per_node=4)
    load = np.full((2, 4, 8), 100)
    plan = plan_step(
        load,
        base=BasePlacement.contiguous(experts=8, ranks=4),
        topology=topology,
        config=PlannerConfig(max_moves=None, dynamic_slots=2),
    )
    assert plan.chosen == "static" and plan.copies == 0 and not plan.replicas


def test_a_previous_plan_is_kept_when_nothing_is_gained() -> None:
    load, base, topology = make(4, 16, 4, 4, 1.2)
    load = load * 1000
    config = PlannerConfig(search_moves=3000)
    first = plan_step(load, base=base, topology=topology, config=config)
    assert first.chosen == "replicas"
    again = plan_step(load + (load > 0), base=base, topology=topology, config=config, previous=first)
    assert again.chosen == "previous"
    np.testing.assert_array_equal(again.hosts_RE, first.hosts_RE)


def test_step_replicas_alone_balance_every_micro_step() -> None:
    topology = Topology.uniform(ranks=32, ranks_per_node=8)
    base = BasePlacement.contiguous(experts=128, ranks=32)
    load = generate_layer(TraceSpec(experts=128, ranks=32, micro_steps=8), step=0, layer=0)
    static = plan_step(load, base=base, topology=topology, config=PlannerConfig(strategy="static"))
    plan = plan_step(load, base=base, topology=topology, config=PlannerConfig(redundant_slots=2))
    assert static.imbalance_M.min() > 1.5
    assert plan.imbalance_M.max() <= 1.01 and plan.copies == 0


def test_resident_copies_are_used_again() -> None:
    rng = np.random.default_rng(1)
    topology = Topology.uniform(ranks=16, ranks_per_node=8)
    base = BasePlacement.contiguous(experts=64, ranks=16)
    config = PlannerConfig(dynamic_slots=2, tolerance=0.03)
    load = random_load(rng, 16, 64, tail=1.0, scale=3000)
    first = plan_micro_step(load, base=base, topology=topology, config=config)
    again = plan_micro_step(
        load + rng.integers(0, 30, load.shape), base=base, topology=topology, config=config, resident_RE=first.hosts_RE
    )
    fresh = plan_micro_step(load + 1, base=base, topology=topology, config=config)
    assert len(again.copies) < len(fresh.copies)


def test_memory_limits_are_hard() -> None:
    load, base, topology = make(2, 8, 4, 3, 1.5)
    load = load * 1000
    config = PlannerConfig(redundant_slots=2, dynamic_slots=1, search_moves=500)
    for slots in (0, 1, 2):
        limit = replica_bytes(config, step_slots=slots, dynamic_slots=0)
        capped = config.model_copy(update={"dynamic_slots": 0, "replica_memory_bytes": limit})
        plan = plan_step(load, base=base, topology=topology, config=capped)
        plan.validate(load)
        assert (plan.hosts_RE.sum(axis=1) <= 4 + slots).all()
    places = [{"node": f"n{r // 4}", "replicaMemoryBytes": 0 if r == 3 else None} for r in range(8)]
    uneven = Topology.checked({"ranks": places})
    problem = StepProblem(base=base, topology=uneven, config=config, load_MSE=load)
    assert problem.slots_R[0].tolist() == [2, 2, 2, 0, 2, 2, 2, 2]


@pytest.mark.parametrize("least", [0, 64, 256])
def test_small_shares_are_not_replicated(least: int) -> None:
    rng = np.random.default_rng(7)
    topology = Topology.uniform(ranks=16, ranks_per_node=8)
    base = BasePlacement.contiguous(experts=64, ranks=16)
    config = PlannerConfig(
        redundant_slots=2, dynamic_slots=1, min_tokens_per_replica=least, search_moves=500,
        cost=CostConstants(gpu=Gpu.CPU),
    )  # fmt: skip
    load = np.stack([random_load(rng, 16, 64, tail=1.0, scale=100) for _ in range(6)])
    step = plan_step(load, base=base, topology=topology, config=config)
    step.validate(load)
    assert step.replicas
    for plan in step.plans:
        shares = plan.quota_C[plan.host_C != base.home_E[plan.expert_C]]
        assert not ((shares > 0) & (shares < least)).any()


def test_moves_stay_within_the_limit_and_help() -> None:
    load, base, topology = make(3, 8, 8, 6, 1.0)
    full = optimize_base(load, topology=topology, config=PlannerConfig(max_moves=None), start=base)
    few = optimize_base(load, topology=topology, config=PlannerConfig(max_moves=6), start=base)
    assert few.moved_from(base).size <= 6
    assert optimize_base(load, topology=topology, config=PlannerConfig(max_moves=0), start=base) == base
    assert full != base
