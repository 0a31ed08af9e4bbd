"""The search for step replicas keeps its books: what it reports is what its result leaves."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.planner.problems import random_load

from foremoe.planner import BasePlacement, PlannerConfig
from foremoe.planner._search import Aim, filled_state, search_slots
from foremoe.planner._search_state import drain
from foremoe.planner.problem import StepProblem
from foremoe.planner.replicas import local_tokens
from foremoe.topology import Topology

RANKS, EXPERTS, MICRO_STEPS = 8, 64, 6


@pytest.mark.parametrize("max_moves", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_flows_kept_up_through_moves_and_their_return_equal_flows_from_scratch(max_moves: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = StepProblem(
        base=BasePlacement.contiguous(experts=EXPERTS, ranks=RANKS),
        topology=Topology.uniform(ranks=RANKS, ranks_per_node=RANKS),
        config=PlannerConfig(redundant_slots=1),
        load_MSE=np.stack([random_load(rng, RANKS, EXPERTS, tail=1.0) for _ in range(MICRO_STEPS)]),
    )
    home_E, load_ME = problem.base.home_E, problem.load_MSE.sum(axis=1)
    aim = Aim(
        home_E=home_E,
        max_moves=max_moves,
        slots_R=problem.slots_R[0],
        slots=1,
        group_R=problem.topology.locality.inner_R,
        local_EG=local_tokens(problem),
    )
    # Without slack nearly every layer keeps some tokens stuck, so the search uses its moves up and goes on.
    cap_M: np.ndarray = -(-load_ME.sum(axis=1) // RANKS)
    empty_RK = np.full((RANKS, 1), -1, dtype=np.int64)
    heat = 0.25 * float(cap_M.mean())

    def search() -> tuple[np.ndarray, np.ndarray, int, int]:
        return search_slots(aim, home_E, load_ME, cap_M, empty_RK, 6000, 100, heat, seed)

    slot_RK, moved_E, stuck, _ = search()
    assert np.count_nonzero(moved_E != home_E) <= max_moves
    assert (np.bincount(moved_E, minlength=RANKS) == EXPERTS // RANKS).all()
    assert all(moved_E[expert] != rank for (rank, _), expert in np.ndenumerate(slot_RK) if expert >= 0)
    state = filled_state(aim, moved_E, load_ME, cap_M, slot_RK)
    assert sum(drain(state, micro_step) for micro_step in range(MICRO_STEPS)) == stuck
    again = search()
    assert (again[0] == slot_RK).all()
    assert (again[1] == moved_E).all()
