"""Lower bounds on step replicas: never above what an exhaustive search reaches."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from foremoe.planner import BasePlacement
from foremoe.planner._relief import relieve, replicas_needed
from foremoe.planner.oracle import least_missed, subset_bound
from foremoe.planner.problem import homes_of


@pytest.mark.parametrize("seed", range(6))
def test_no_fill_misses_fewer_micro_steps_than_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load_ME = rng.poisson(np.exp(rng.normal(0, 1.2, (4, 6))) * 50).astype(np.int64)
    base = BasePlacement.contiguous(experts=6, ranks=3)
    limit = 1.1
    away = [(rank, expert) for rank in range(3) for expert in range(6) if base.home_E[expert] != rank]
    fewest = len(load_ME)
    for fill in combinations(away, 3):
        if len({rank for rank, _ in fill}) < 3:
            continue
        hosts = homes_of(base)
        for rank, expert in fill:
            hosts[rank, expert] = True
        missed = sum(subset_bound(load_E, hosts) > limit * load_E.sum() / 3 for load_E in load_ME)
        fewest = min(fewest, missed)
    bound = least_missed(load_ME, base.home_E, slots_R=np.ones(3, dtype=np.int64), limit=limit)
    assert 0 <= bound <= fewest


def test_without_slots_the_bound_counts_every_unbalanced_micro_step() -> None:
    load_ME = np.array([[10, 10, 10, 10], [40, 0, 0, 0], [20, 20, 0, 0]])
    home_E = np.array([0, 0, 1, 1])
    assert least_missed(load_ME, home_E, slots_R=np.zeros(2, dtype=np.int64), limit=1.05) == 2


def test_moves_that_relieve_stay_within_their_number_and_lower_the_need() -> None:
    rng = np.random.default_rng(0)
    load_ME = rng.poisson(np.exp(rng.normal(0, 1.0, (6, 32))) * 200).astype(np.int64)
    home_E = BasePlacement.contiguous(experts=32, ranks=8).home_E
    cap_M = -(-load_ME.sum(axis=1) // 8)

    def need(homes: np.ndarray) -> float:
        return sum(replicas_needed(load_ME, homes, rank, cap_M) for rank in range(8))

    moved = relieve(load_ME, home_E, cap_M, 8, 4, 2000, 0)
    assert (moved != home_E).sum() <= 4
    assert (np.bincount(moved, minlength=8) == 4).all()
    assert need(moved) <= need(home_E)
    assert (relieve(load_ME, home_E, cap_M, 8, 4, 2000, 0) == moved).all()
