"""Step replicas: which experts fill the redundant slots for a whole step.

All micro-steps are known, so slots are chosen such that the exact assignment alone can bring every rank of
every micro-step under its cap. What is missing is measured by a flow: the *stuck* tokens of a micro-step are
those above the cap on ranks from which no path leads to a rank below it. The ranks such a search reaches
form the bottleneck (a minimum cut); only a copy of an expert with tokens inside it, placed outside it, can
help. So proposals are drawn from the bottleneck instead of blindly, and a proposal is judged by repairing the
flows it touches. Micro-steps in which a replaced copy has no tokens and nothing is stuck cost nothing. Worse states
are accepted with a probability that falls with the tokens they leave stuck and with time (simulated annealing).

The second goal is locality: tokens of experts with a copy in the group (node) they come from need not leave
it. How many could stay is a sum over (expert, group) pairs with a copy, so each group's best fill is known in
advance; the search starts there and gives way to balance only as far as needed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foremoe.planner._flow import Ints
from foremoe.planner._jit import kernel
from foremoe.planner._random import random_below
from foremoe.planner._search_changes import (
    change_slot,
    exchange,
    exchange_slots,
    restore,
    swap_homes,
    trade_places,
    undo,
)
from foremoe.planner._search_proposals import propose_exchange, propose_local, propose_repair, propose_swap
from foremoe.planner._search_state import Bools, State, attach, drain, kept_tokens, new_state

_EXCHANGES_IN_TEN = 6
# The temperature falls to this share of its start.
_COOLED = 0.01
_FINE = 1 << 30


class Aim(NamedTuple):
    """What stays as it is during a search."""

    home_E: Ints
    """Homes as they were before the step; `max_moves` counts from them."""
    max_moves: int
    slots_R: Ints
    slots: int
    """Largest number of slots of a rank."""
    group_R: Ints
    local_EG: Ints
    """Tokens of an expert from each group over all micro-steps."""


class Best(NamedTuple):
    """The best state so far."""

    expert_C: Ints
    home_E: Ints
    stuck: Ints
    """One number."""


class Work(NamedTuple):
    """What the search changes beside the state."""

    random: npt.NDArray[np.uint64]
    backup: State
    touched_M: Bools
    value_C: Ints
    """Tokens a slot keeps in its group that no other copy does."""


@kernel
def search_slots(
    aim: Aim,
    start_home_E: Ints,
    load_ME: Ints,
    cap_M: Ints,
    start_RK: Ints,
    tries: int,
    patience: int,
    heat: float,
    seed: int,
) -> tuple[Ints, Ints, int, int]:
    """(experts in the slots [R, K] with -1 for empty, homes, stuck tokens left, tries used).

    `start_RK` is the fill to start from. At first a change that leaves `heat` more tokens stuck is accepted with
    probability 1/e. Stops after `tries` proposals, or when nothing is stuck and `patience` proposals for locality
    in a row brought nothing.
    """
    state = filled_state(aim, start_home_E, load_ME, cap_M, start_RK)
    stuck = 0
    for micro_step in range(cap_M.size):
        stuck += drain(state, micro_step)
    work = Work(
        np.array([seed * 2 + 88172645463325253], np.uint64),
        new_state(start_home_E, load_ME, cap_M, aim.slots, aim.slots_R.size),
        np.zeros(cap_M.size, np.bool_),
        np.zeros(state.expert_C.size, np.int64),
    )
    for expert in range(aim.home_E.size):
        value_again(state, aim, work.value_C, expert)
    best = Best(state.expert_C.copy(), state.host_C[: aim.home_E.size].copy(), np.array([stuck]))
    moved = count_moved(state, aim)
    used, idle = 0, 0
    while used < tries and idle < patience:
        used += 1
        chance = (random_below(work.random, _FINE) + 1) / _FINE
        limit = stuck - np.log(chance) * heat * _COOLED ** (used / tries)
        before = stuck
        if stuck > 0 and aim.max_moves > 0 and random_below(work.random, 3) == 0:
            stuck = try_swap(state, aim, work, moved, stuck, limit)
            moved = count_moved(state, aim)
        elif stuck > 0 and random_below(work.random, 10) < _EXCHANGES_IN_TEN:
            stuck = try_exchange(state, aim, work, stuck, limit)
        else:
            idle = idle + 1 if stuck == 0 else idle
            stuck, taken = try_change(state, aim, work, stuck, limit)
            idle = 0 if taken else idle
        if stuck < best.stuck[0] or (stuck == best.stuck[0] and (idle == 0 or stuck < before)):
            best.stuck[0] = stuck
            best.expert_C[:] = state.expert_C
            best.home_E[:] = state.host_C[: aim.home_E.size]
    return slots_of(best.expert_C, aim), best.home_E, int(best.stuck[0]), used


@kernel
def filled_state(aim: Aim, start_home_E: Ints, load_ME: Ints, cap_M: Ints, start_RK: Ints) -> State:
    """All tokens at home, slots filled."""
    ranks = aim.slots_R.size
    state = new_state(start_home_E, load_ME, cap_M, aim.slots, ranks)
    for rank in range(ranks):
        for slot in range(aim.slots_R[rank]):
            if start_RK[rank, slot] >= 0:
                attach(state, aim.home_E.size + rank * aim.slots + slot, start_RK[rank, slot])
    return state


@kernel
def slots_of(expert_C: Ints, aim: Aim) -> Ints:
    """Experts in the slots, [R, K], -1 for empty."""
    slot_RK = np.full((aim.slots_R.size, aim.slots), -1, np.int64)
    for rank in range(aim.slots_R.size):
        for slot in range(aim.slots_R[rank]):
            slot_RK[rank, slot] = expert_C[aim.home_E.size + rank * aim.slots + slot]
    return slot_RK


@kernel
def count_moved(state: State, aim: Aim) -> int:
    """Experts away from the homes before the step."""
    moved = 0
    if aim.max_moves > 0:
        for expert in range(aim.home_E.size):
            moved += state.host_C[expert] != aim.home_E[expert]
    return moved


@kernel
def value_again(state: State, aim: Aim, value_C: Ints, expert: int) -> None:
    """Find again what the replicas of an expert keep in their groups."""
    for position in range(state.count_E[expert]):
        copy = state.copies_EX[expert, position]
        if copy >= aim.home_E.size:
            group = aim.group_R[state.host_C[copy]]
            value_C[copy] = kept_tokens(state, expert, group, copy, aim.group_R, aim.local_EG)


@kernel
def try_swap(state: State, aim: Aim, work: Work, moved: int, stuck: int, limit: float) -> int:
    """Swap two homes if that leaves no more than `limit` tokens stuck; returns the tokens stuck."""
    left, right, back, forth = propose_swap(state, work.random, aim.home_E, moved, aim.max_moves)
    if left < 0:
        return stuck
    total = swap_homes(state, left, right, back, forth, work.backup, work.touched_M, limit)
    if total <= limit:
        return total
    trade_places(state, left, right)
    if back >= 0:
        trade_places(state, back, forth)
    restore(state, work.backup, work.touched_M)
    return stuck


@kernel
def try_exchange(state: State, aim: Aim, work: Work, stuck: int, limit: float) -> int:
    """Exchange two slots if that leaves no more than `limit` tokens stuck; returns the tokens stuck."""
    left, right = propose_exchange(state, work.random, aim.slots_R, aim.slots)
    if left < 0:
        return stuck
    total = exchange_slots(state, left, right, work.backup, work.touched_M, limit)
    if total <= limit:
        value_again(state, aim, work.value_C, state.expert_C[left])
        value_again(state, aim, work.value_C, state.expert_C[right])
        return total
    exchange(state, left, right)
    restore(state, work.backup, work.touched_M)
    return stuck


@kernel
def try_change(state: State, aim: Aim, work: Work, stuck: int, limit: float) -> tuple[int, bool]:
    """Give a slot to another expert, for balance, or for locality once nothing is stuck: (tokens stuck, changed)."""
    if stuck > 0:
        copy, expert = propose_repair(state, work.random, aim.slots_R, aim.slots, work.value_C)
    else:
        copy, expert = propose_local(
            state, work.random, aim.slots_R, aim.slots, work.value_C, aim.group_R, aim.local_EG
        )
    if copy < 0:
        return stuck, False
    old = state.expert_C[copy]
    group = aim.group_R[state.host_C[copy]]
    gain = kept_tokens(state, expert, group, copy, aim.group_R, aim.local_EG) - work.value_C[copy]
    if stuck == 0 and gain <= 0:
        return stuck, False
    total = change_slot(state, copy, expert, work.backup, work.touched_M, limit)
    if total <= limit and (total != stuck or gain >= 0 or random_below(work.random, 4) == 0):
        value_again(state, aim, work.value_C, expert)
        if old >= 0:
            value_again(state, aim, work.value_C, old)
        return total, True
    undo(state, copy, old, work.backup, work.touched_M)
    return stuck, False
