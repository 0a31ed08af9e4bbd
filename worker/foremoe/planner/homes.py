"""Choosing homes: `optimize_base`, and how many of its moves are worth making."""

from __future__ import annotations

import numpy as np

from foremoe.planner._homes import descend, home_cost, longest_first, polish
from foremoe.planner.base import BasePlacement
from foremoe.planner.plan import Ints
from foremoe.topology import Topology

NODE_WEIGHT = 3
"""Tokens above the mean of a node count this much more than tokens above that of a rank."""
_TRIES_PER_EXPERT = 150
_ALL_PAIRS_WORK = 300_000
_EXTRA_STARTS = 4096


def refined_homes(
    load_ME: Ints, *, start: BasePlacement, topology: Topology, max_moves: int | None, seed: int
) -> BasePlacement:
    """Homes with a low `home_cost` and at most `max_moves` experts away from `start` (None: no limit)."""
    node_R = topology.domain_R
    if max_moves == 0:
        return start
    if max_moves is not None and max_moves < start.experts:
        homes = descend(load_ME, start.home_E, node_R, NODE_WEIGHT, max_moves, 0.0)
        return BasePlacement(home_E=homes, ranks=start.ranks)
    starts = [start.home_E, longest_first(load_ME.sum(axis=0), start.ranks)]
    # Small cases have few good placements and cost nothing: try many starts.
    random = np.random.default_rng(seed)
    starts += [random.permutation(start.home_E) for _ in range(_EXTRA_STARTS // start.experts**2)]
    best, best_cost = start.home_E, home_cost(load_ME, start.home_E, node_R, NODE_WEIGHT)
    for number, homes in enumerate(starts):
        homes = polish(load_ME, homes, node_R, NODE_WEIGHT, _TRIES_PER_EXPERT * start.experts, seed + number)
        if load_ME.shape[0] * start.experts**2 <= _ALL_PAIRS_WORK:
            homes = descend(load_ME, homes, node_R, NODE_WEIGHT, start.experts, 0.0)
        cost = home_cost(load_ME, homes, node_R, NODE_WEIGHT)
        if cost < best_cost:
            best, best_cost = homes, cost
    return BasePlacement(home_E=np.asarray(best), ranks=start.ranks)
