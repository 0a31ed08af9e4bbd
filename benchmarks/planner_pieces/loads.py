"""Loads, machines and placements that several pieces measure on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foremoe.planner import BasePlacement, PlannerConfig, optimize_base
from foremoe.planner._assign import dynamic_plan
from foremoe.planner._flow import Layout
from foremoe.planner.cost import CostConstants
from foremoe.planner.plan import Plan
from foremoe.routing.generator import Skew, TraceSpec, generate_layer
from foremoe.topology import Topology

NODE = 8
# With all traffic hidden the cost model ranks plans by balance alone; bars of balance are measured so.
ONLY_BALANCE = CostConstants(copy_overlap=1.0, exchange_overlap=1.0)


@dataclass(frozen=True)
class Scale:
    """How much to run."""

    seeds: int
    layers: int
    sizes: tuple[tuple[int, int], ...]
    random_cases: int


FULL = Scale(3, 2, ((128, 8), (128, 16), (128, 32), (128, 64), (256, 8), (256, 16), (256, 32), (256, 64)), 1000)
QUICK = Scale(1, 1, ((128, 8), (128, 64), (256, 64)), 100)


@lru_cache(maxsize=64)
def load_of(
    experts: int, ranks: int, skew: Skew, seed: int, layer: int, step: int, micro_steps: int = 16
) -> np.ndarray:
    spec = TraceSpec(experts=experts, ranks=ranks, skew=skew, seed=seed, micro_steps=micro_steps, layers=layer + 1)
    return generate_layer(spec, step=step, layer=layer).astype(np.int64)


def machine(ranks: int) -> Topology:
    return Topology.uniform(ranks=ranks, ranks_per_node=min(NODE, ranks))


def cases(scale: Scale, experts: int, ranks: int, skew: Skew) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(load of the step before, load of the step, seed)."""
    for seed in range(scale.seeds):
        for layer in range(scale.layers):
            yield load_of(experts, ranks, skew, seed, layer, 0), load_of(experts, ranks, skew, seed, layer, 1), seed


def spread(values: list[float]) -> tuple[float, float, float]:
    array = np.array(values)
    return float(array.mean()), float(np.quantile(array, 0.95)), float(array.max())


def refined(load: np.ndarray, topology: Topology) -> BasePlacement:
    return optimize_base(load, topology=topology, config=PlannerConfig(max_moves=None))


def cpu_ms(call: Callable[[], object], repeats: int = 1) -> float:
    start = time.process_time_ns()
    for _ in range(repeats):
        call()
    return (time.process_time_ns() - start) / repeats / 1e6


def greedy_plan(load_SE: np.ndarray, base: BasePlacement, topology: Topology, layout: Layout, tolerance: float) -> Plan:
    return dynamic_plan(
        load_SE, layout, home_E=base.home_E, topology=topology, capacity_R=np.full(base.ranks, 1 << 20),
        slots_R=np.full(base.ranks, 2), tolerance=tolerance, min_share=0, present_RE=None,
    )  # fmt: skip
