"""Base refinement against the integer optimum; the cost model and its calibration."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.planner.problems import random_load

from foremoe.errors import PlannerError
from foremoe.planner import BasePlacement, PlannerConfig, optimize_base
from foremoe.planner._homes import descend, home_cost
from foremoe.planner.cost import CostConstants, CostModel, LayerLoad, Measurement, calibrate
from foremoe.planner.homes import NODE_WEIGHT
from foremoe.planner.oracle import mip_homes
from foremoe.topology import Topology


@pytest.mark.parametrize("seed", range(6))
def test_homes_are_within_one_percent_of_the_integer_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = Topology.uniform(ranks=4, ranks_per_node=2)
    load = np.stack([random_load(rng, 4, 8, tail=0.8, scale=200) for _ in range(2)])
    homes = optimize_base(load, topology=topology, config=PlannerConfig(max_moves=None))
    load_ME = load.sum(axis=1)
    best = mip_homes(load_ME, ranks=4, node_R=topology.node_R, node_weight=NODE_WEIGHT)
    found = home_cost(load_ME, homes.home_E, topology.node_R, NODE_WEIGHT)
    assert found >= best - 1e-6
    # Relative to the tokens to place: an optimum of zero leaves nothing to be relative to.
    assert found - best <= 0.01 * load_ME.sum() / 2


def test_descent_counts_moves_and_never_gets_worse() -> None:
    rng = np.random.default_rng(2)
    topology = Topology.uniform(ranks=8, ranks_per_node=4)
    load_ME = np.stack([random_load(rng, 8, 32).sum(axis=0) for _ in range(3)])
    start = BasePlacement.contiguous(experts=32, ranks=8)
    before = home_cost(load_ME, start.home_E, topology.node_R, NODE_WEIGHT)
    costs = [before]
    for limit in (2, 4, 8, 16, 32):
        homes = descend(load_ME, start.home_E, topology.node_R, NODE_WEIGHT, limit, 0.0)
        assert (homes != start.home_E).sum() <= limit
        BasePlacement(home_E=homes, ranks=8)
        costs.append(home_cost(load_ME, homes, topology.node_R, NODE_WEIGHT))
    assert costs == sorted(costs, reverse=True)


def test_cost_grows_with_every_cause() -> None:
    model = CostModel(CostConstants(), Topology.uniform(ranks=64, ranks_per_node=8))
    plain = LayerLoad(max_rank_pairs=32768, max_node_pairs=200_000, tokens_per_rank=4096.0)
    base = model.layer(plain).total
    worse = [
        LayerLoad(max_rank_pairs=65536, max_node_pairs=200_000, tokens_per_rank=4096.0),
        LayerLoad(max_rank_pairs=32768, max_node_pairs=400_000, tokens_per_rank=4096.0),
        LayerLoad(max_rank_pairs=32768, max_node_pairs=200_000, tokens_per_rank=4096.0, copy_network_experts=20),
    ]
    assert all(model.layer(load).total > base for load in worse)
    assert model.layer(plain).exposed_copy == 0


def test_calibration_recovers_the_rate_and_refuses_nonsense() -> None:
    topology = Topology.uniform(ranks=8, ranks_per_node=8)
    constants = CostConstants(utilisation=0.37)
    truth = CostModel(constants, topology)
    gemm = [Measurement(pairs=n, seconds=4e-5 + n * truth.expert_seconds_per_pair) for n in (1000, 5000, 20000)]
    exchange = [Measurement(pairs=n, seconds=1e-5 + n * truth.rank_seconds_per_pair / 2) for n in (1000, 8000)]
    fitted, links = calibrate(CostConstants(), topology, gemm=gemm, exchange=exchange)
    assert fitted.utilisation == pytest.approx(0.37, rel=1e-6)
    assert links.domain_link.bandwidth_bytes_per_second == pytest.approx(900e9, rel=1e-6)
    assert links.domain_link.latency_seconds == pytest.approx(1e-5, rel=1e-3)
    for bad in (
        [],
        [Measurement(pairs=1, seconds=1.0)],
        [Measurement(pairs=1, seconds=2.0), Measurement(pairs=9, seconds=1.0)],
    ):
        with pytest.raises(PlannerError, match="calibration of gemm"):
            calibrate(CostConstants(), topology, gemm=bad)
    with pytest.raises(PlannerError, match="finite"):
        calibrate(
            CostConstants(),
            topology,
            gemm=[Measurement(pairs=1, seconds=1.0), Measurement(pairs=2, seconds=float("inf"))],
        )
