"""Random planning problems for all planner tests."""

from __future__ import annotations

import numpy as np

from foremoe.planner import BasePlacement
from foremoe.topology import Topology


def random_load(
    rng: np.random.Generator, ranks: int, experts: int, *, tail: float = 1.0, scale: float = 50.0
) -> np.ndarray:
    """Heavy-tailed loads, int64 [S, E]; some are zero."""
    popularity = np.exp(rng.normal(0, tail, experts))
    return rng.poisson(popularity / popularity.mean() * scale, (ranks, experts)).astype(np.int64)


def random_hosts(rng: np.random.Generator, base: BasePlacement, slots: int) -> np.ndarray:
    """Homes and up to `slots` random replicas a rank."""
    hosts = np.zeros((base.ranks, base.experts), dtype=bool)
    hosts[base.home_E, np.arange(base.experts)] = True
    for rank in range(base.ranks):
        free = np.flatnonzero(~hosts[rank])
        chosen = rng.choice(free, size=min(slots, free.size), replace=False)
        hosts[rank, chosen] = True
    return hosts


def random_topology(rng: np.random.Generator, ranks: int) -> Topology:
    """Nodes and domains that nest, of random sizes."""
    node = rng.integers(0, max(1, ranks // 2) + 1, ranks)
    domain = node // int(rng.integers(1, 4))
    if rng.random() < 0.3:
        node, domain = domain, node
    return Topology.of_places([(f"n{a}", f"d{b}") for a, b in zip(node, domain, strict=True)])
