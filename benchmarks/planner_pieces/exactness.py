"""Exactness of assignment and homes against independent optima."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foremoe.planner import BasePlacement, PlannerConfig, assign, optimize_base
from foremoe.planner._homes import home_cost
from foremoe.planner.homes import NODE_WEIGHT
from foremoe.planner.oracle import lp_assignment, mip_homes
from foremoe.planner.problem import homes_of
from foremoe.routing.generator import Skew
from foremoe.topology import Topology
from planner_pieces.cells import Cell
from planner_pieces.loads import FULL, Scale, cases, cpu_ms, load_of, machine, refined


def exact(scale: Scale) -> Iterator[Cell]:
    """The assignment against HiGHS on random instances: all three goals."""
    rng = np.random.default_rng(0)
    load_differs = cross_differs = 0
    for _ in range(scale.random_cases):
        ranks = int(rng.choice([2, 4, 6, 8]))
        experts = ranks * int(rng.integers(1, 5))
        topology = Topology.uniform(ranks=ranks, ranks_per_node=ranks // 2)
        load, hosts = random_instance(rng, ranks, experts)
        plan = assign(load, hosts, topology=topology)
        best = lp_assignment(load, hosts, topology)
        load_differs += int(plan.rank_load_R.max()) != best.max_load
        cross_differs += plan.crossing(topology.node_R) != best.cross_node
    yield Cell("exact", f"{scale.random_cases} random instances: optimum differs", load_differs, 0, 0)
    yield Cell("exact", f"{scale.random_cases} random instances: cross-node tokens differ", cross_differs, None, 0)


def random_instance(
    rng: np.random.Generator, ranks: int, experts: int, slots: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    popularity = np.exp(rng.normal(0, rng.uniform(0, 2), experts))
    load = rng.poisson(popularity / popularity.mean() * rng.choice([1, 20, 500]), (ranks, experts)).astype(np.int64)
    hosts = homes_of(BasePlacement.contiguous(experts=experts, ranks=ranks))
    for rank in range(ranks):
        free = np.flatnonzero(~hosts[rank])
        hosts[rank, rng.choice(free, size=min(slots, free.size), replace=False)] = True
    return load, hosts


def homes(scale: Scale) -> Iterator[Cell]:
    """Base placement: against the integer optimum, time, gain of few moves."""
    rng = np.random.default_rng(3)
    worst = 0.0
    for _ in range(20 if scale is FULL else 5):
        topology = Topology.uniform(ranks=4, ranks_per_node=2)
        load = rng.poisson(np.exp(rng.normal(0, 0.8, 8)) * 100, (2, 4, 8)).astype(np.int64)
        found = home_cost(load.sum(axis=1), refined(load, topology).home_E, topology.node_R, NODE_WEIGHT)
        best = mip_homes(load.sum(axis=1), ranks=4, node_R=topology.node_R, node_weight=NODE_WEIGHT)
        worst = max(worst, found / best - 1 if best else float(found > 0))
    yield Cell("homes", "objective over the integer optimum, worst small case", worst, 0.01)
    topology = machine(64)
    layers = [load_of(256, 64, Skew.MEDIUM, 0, layer, 0) for layer in range(4)]
    seconds = cpu_ms(lambda: [refined(load, topology) for load in layers]) / 4e3 * 94
    yield Cell("homes", "94 layers, E256 EP64, M16: s (4 layers measured, scaled)", seconds, 2.0)
    for experts, ranks in ((128, 32), (128, 64), (256, 64)):
        topology = machine(ranks)
        gains = []
        for before, _, _ in cases(scale, experts, ranks, Skew.MEDIUM):
            load_ME = before.sum(axis=1)
            start = BasePlacement.contiguous(experts=experts, ranks=ranks)
            few = optimize_base(before, topology=topology, config=PlannerConfig(max_moves=experts // 5), start=start)
            cost = [
                home_cost(load_ME, b.home_E, topology.node_R, NODE_WEIGHT)
                for b in (start, few, refined(before, topology))
            ]
            gains.append((cost[0] - cost[1]) / (cost[0] - cost[2]))
        yield Cell(
            "homes",
            f"share of the gain with 20 % of experts moved, E{experts} EP{ranks} medium",
            float(np.mean(gains)),
            None,
            0.95,
            True,
        )
