"""Step replicas of a layer: set up the search, run it, return homes and hosts."""

from __future__ import annotations

import numpy as np

from foremoe.planner._relief import relieve
from foremoe.planner._search import Aim, search_slots
from foremoe.planner.base import BasePlacement
from foremoe.planner.homes import refined_homes
from foremoe.planner.plan import Bools, Ints
from foremoe.planner.problem import StepProblem, homes_of

# Slots are searched for this much load above the mean: exact balance is not worth many more tries.
_SLACK = 0.002
# The search starts by accepting changes that leave this part of a rank's mean load more stuck.
_HEAT = 0.25
_PATIENCE = 300
# Where more than this share of all tokens stays stuck, a longer search from another seed is worth its time: so many
# times as long for a group of so many ranks times micro-steps, since a try takes longer the more there are.
_HARD = 1e-4
# It looks only at what is above this: else a hard layer pays for the last per mille everywhere with one bad micro-step.
_HARD_SLACK = 0.01
_MORE = 8
_MORE_SIZE = 384
# A slot can be filled with any expert: so many tries for each of these choices see what there is to see.
_TRIES_PER_CHOICE = 320


def search_replicas(problem: StepProblem, *, max_moves: int) -> tuple[BasePlacement, Bools]:
    """(homes, hosts bool [R, E]) for a step; at most `max_moves` experts change home."""
    load_ME = problem.load_MSE.sum(axis=1)
    start = _start_homes(problem, load_ME, max_moves)
    slots_R = problem.slots_R[0]
    if not slots_R.any():
        return start, homes_of(start)
    ranks, config = problem.base.ranks, problem.config
    fill_RK = local_fill(problem, start, load_ME)
    aim = Aim(
        home_E=problem.base.home_E,
        max_moves=max_moves,
        slots_R=slots_R,
        slots=int(slots_R.max()),
        group_R=problem.topology.locality.inner_R,
        local_EG=local_tokens(problem),
    )
    size = ranks * load_ME.shape[0]
    total = int(load_ME.sum())

    most_tries = _TRIES_PER_CHOICE * int(slots_R.sum()) * problem.base.experts

    def search(slack: float, tries: int, seed: int) -> tuple[Ints, Ints, int, int]:
        cap_M = _caps(load_ME, ranks, slack)
        tries = min(tries, most_tries)
        return search_slots(aim, start.home_E, load_ME, cap_M, fill_RK, tries, _PATIENCE, _HEAT * total / size, seed)

    slot_RK, home_E, stuck, _ = search(_SLACK, config.search_moves, config.seed)
    if stuck > _HARD * total:
        more = min(_MORE, max(3, _MORE * _MORE_SIZE // size))
        # What stays above the tolerance is left to dynamic slots, so only that counts where there are some.
        slack = max(_HARD_SLACK, config.tolerance) if problem.slots_R[1].any() else _HARD_SLACK
        other_RK, other_E, other_stuck, _ = search(slack, more * config.search_moves, config.seed + 1)
        if other_stuck < stuck:
            slot_RK, home_E = other_RK, other_E
    homes = BasePlacement(home_E=home_E, ranks=ranks)
    return homes, hosts_of(homes, slot_RK)


def _start_homes(problem: StepProblem, load_ME: Ints, max_moves: int) -> BasePlacement:
    """Homes to search from: as they are, or with moves that spare replicas; free homes are refined for equal loads."""
    base, config = problem.base, problem.config
    if max_moves == 0:
        return base
    if max_moves >= base.experts or not problem.slots_R[0].any():
        return refined_homes(load_ME, start=base, topology=problem.topology, max_moves=max_moves, seed=config.seed)
    cap_M = _caps(load_ME, base.ranks, _SLACK)
    home_E = relieve(load_ME, base.home_E, cap_M, base.ranks, max_moves, config.search_moves, config.seed)
    return BasePlacement(home_E=home_E, ranks=base.ranks)


def _caps(load_ME: Ints, ranks: int, slack: float) -> Ints:
    """Load a rank may have in each micro-step."""
    caps: Ints = np.ceil(load_ME.sum(axis=1) * (1 + slack) / ranks).astype(np.int64)
    return caps


def local_fill(problem: StepProblem, base: BasePlacement, load_ME: Ints) -> Ints:
    """Where the search starts: slots [R, K] filled for locality, -1 = empty.

    Each group of ranks takes the experts whose tokens it would keep most of, on its least loaded ranks; slots that
    keep nothing more take the experts with the highest load per copy.
    """
    slots_R = problem.slots_R[0]
    group_R = problem.topology.locality.inner_R
    weight_E = load_ME.sum(axis=0).astype(np.float64)
    hosts = homes_of(base)
    slot_RK = np.full((base.ranks, int(slots_R.max())), -1, dtype=np.int64)
    free_R = slots_R.copy()
    count_E = np.ones(base.experts)
    local_EG = local_tokens(problem).astype(np.float64)
    group_rank_GR = np.arange(local_EG.shape[1])[:, None] == group_R
    for _ in range(int(free_R.sum())):
        # A rank can take an expert it does not hold; a group gains one it does not hold anywhere.
        open_RE = (free_R > 0)[:, None] & ~hosts
        held_GE = group_rank_GR.astype(np.float64) @ hosts > 0
        can_GE = group_rank_GR.astype(np.float64) @ open_RE > 0
        gain_GE = np.where(can_GE & ~held_GE, local_EG.T, 0.0)
        if gain_GE.max() > 0:
            group, expert = np.unravel_index(int(gain_GE.argmax()), gain_GE.shape)
            allowed_R = open_RE[:, expert] & group_rank_GR[group]
        else:
            share_E = np.where(open_RE.any(axis=0), weight_E / count_E, -1.0)
            expert = share_E.argmax()
            if share_E[expert] < 0:
                break
            allowed_R = open_RE[:, expert]
        load_R = hosts @ (weight_E / count_E)
        rank = int(np.where(allowed_R, load_R, np.inf).argmin())
        slot_RK[rank, slots_R[rank] - free_R[rank]] = expert
        hosts[rank, expert] = True
        free_R[rank] -= 1
        count_E[expert] += 1
    return slot_RK


def local_tokens(problem: StepProblem) -> Ints:
    """Tokens of every expert that come from each inner group of ranks, over the step: int64 [E, G]."""
    inner_R = problem.topology.locality.inner_R
    local_GE = np.zeros((int(inner_R.max()) + 1, problem.base.experts), dtype=np.int64)
    np.add.at(local_GE, inner_R, problem.load_MSE.sum(axis=0))
    return np.ascontiguousarray(local_GE.T)


def hosts_of(base: BasePlacement, slot_RK: Ints) -> Bools:
    """Host matrix of homes and filled slots (-1 = empty): bool [R, E]."""
    hosts = homes_of(base)
    rank, slot = np.nonzero(slot_RK >= 0)
    hosts[rank, slot_RK[rank, slot]] = True
    return hosts
