"""The exact assignment against independent optima."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.planner.problems import random_hosts, random_load, random_topology

from foremoe.planner import BasePlacement, assign
from foremoe.planner.oracle import lp_assignment, subset_bound
from foremoe.topology import Topology


@pytest.mark.parametrize("seed", range(8))
def test_optimal_in_all_three_goals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(25):
        ranks = int(rng.integers(1, 9))
        experts = ranks * int(rng.integers(1, 4))
        topology = random_topology(rng, ranks)
        base = BasePlacement.contiguous(experts=experts, ranks=ranks)
        load = random_load(rng, ranks, experts, tail=float(rng.uniform(0, 2)), scale=float(rng.choice([0.3, 4, 60])))
        hosts = random_hosts(rng, base, int(rng.integers(0, 4)))
        plan = assign(load, hosts, topology=topology)
        plan.validate(load)
        best = lp_assignment(load, hosts, topology)
        assert int(plan.rank_load_R.max()) == best.max_load
        assert plan.crossing(topology.domain_R) == best.cross_domain
        assert plan.crossing(topology.node_R) == best.cross_node


@pytest.mark.parametrize("seed", range(4))
def test_optimal_load_equals_the_subset_bound(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(50):
        ranks = int(rng.integers(2, 11))
        experts = ranks * int(rng.integers(1, 5))
        base = BasePlacement.contiguous(experts=experts, ranks=ranks)
        load = random_load(rng, ranks, experts, tail=1.5)
        hosts = random_hosts(rng, base, int(rng.integers(0, 3)))
        plan = assign(load, hosts, topology=Topology.uniform(ranks=ranks, ranks_per_node=ranks))
        assert int(plan.rank_load_R.max()) == subset_bound(load.sum(axis=0), hosts)


def test_large_instance_is_exact_and_deterministic() -> None:
    rng = np.random.default_rng(5)
    topology = Topology.uniform(ranks=64, ranks_per_node=8)
    base = BasePlacement.contiguous(experts=256, ranks=64)
    load = random_load(rng, 64, 256, tail=1.0)
    hosts = random_hosts(rng, base, 2)
    one, two = (assign(load, hosts, topology=topology) for _ in range(2))
    one.validate(load)
    np.testing.assert_array_equal(one.split_XS, two.split_XS)
    assert int(one.rank_load_R.max()) >= -(-int(load.sum()) // 64)


def test_huge_loads_stay_exact() -> None:
    topology = Topology.uniform(ranks=4, ranks_per_node=2)
    base = BasePlacement.contiguous(experts=8, ranks=4)
    load = np.zeros((4, 8), dtype=np.int64)
    load[:, 0] = 10**9 + 7
    hosts = random_hosts(np.random.default_rng(0), base, 8)
    plan = assign(load, hosts, topology=topology)
    plan.validate(load)
    assert int(plan.rank_load_R.max()) == 10**9 + 7


def test_tokens_of_a_source_agree_with_the_dense_split() -> None:
    rng = np.random.default_rng(3)
    topology = Topology.uniform(ranks=8, ranks_per_node=4)
    base = BasePlacement.contiguous(experts=16, ranks=8)
    load = random_load(rng, 8, 16)
    plan = assign(load, random_hosts(rng, base, 2), topology=topology)
    dense = plan.tokens_SER()
    for source in range(8):
        np.testing.assert_array_equal(plan.tokens_ER(source), dense[source])
    assert plan.traffic_GG(np.arange(8)).sum() == load.sum()
