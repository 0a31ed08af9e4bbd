"""State of the search for step replicas, and the flows in it.

A state holds, for all micro-steps of a step, the quota of every copy and the load of every rank. Excess flows out
along any path of existing copies. What finds no way out is *stuck*; the ranks such a search reaches form the
bottleneck.

Copies are numbered: c < E is expert c at home; E + rank * K + slot is a replica slot.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foremoe.planner._flow import Ints
from foremoe.planner._jit import kernel

Bools = npt.NDArray[np.bool_]


class State(NamedTuple):
    """Everything the search changes in place."""

    expert_C: Ints
    """Expert of every copy, -1 for an empty slot."""
    host_C: Ints
    copies_EX: Ints
    """Copies of every expert; the first count_E are valid."""
    count_E: Ints
    place_C: Ints
    """Position of a copy in copies_EX."""
    rank_copy_RX: Ints
    """All copies on a rank: home experts, then slots."""
    quota_MC: Ints
    load_MR: Ints
    cap_M: Ints
    stuck_M: Ints
    queue: Ints
    out_R: Ints
    in_R: Ints
    seen_R: Ints
    seen_E: Ints
    closed_R: Ints
    stamp: Ints


@kernel
def new_state(home_E: Ints, load_ME: Ints, cap_M: Ints, slots: int, ranks: int) -> State:
    """All tokens at home, all slots empty. `slots` is the largest number of slots of a rank."""
    experts = home_E.size
    micro_steps = load_ME.shape[0]
    total = experts + ranks * slots
    expert_C = np.full(total, -1, np.int64)
    host_C = np.empty(total, np.int64)
    copies_EX = np.full((experts, ranks), -1, np.int64)
    place_C = np.full(total, -1, np.int64)
    homes = experts // ranks
    rank_copy_RX = np.empty((ranks, homes + slots), np.int64)
    fill_R = np.zeros(ranks, np.int64)
    quota_MC = np.zeros((micro_steps, total), np.int64)
    load_MR = np.zeros((micro_steps, ranks), np.int64)
    for expert in range(experts):
        rank = home_E[expert]
        expert_C[expert] = expert
        host_C[expert] = rank
        copies_EX[expert, 0] = expert
        place_C[expert] = 0
        rank_copy_RX[rank, fill_R[rank]] = expert
        fill_R[rank] += 1
        for micro_step in range(micro_steps):
            quota_MC[micro_step, expert] = load_ME[micro_step, expert]
            load_MR[micro_step, rank] += load_ME[micro_step, expert]
    for rank in range(ranks):
        for slot in range(slots):
            copy = experts + rank * slots + slot
            host_C[copy] = rank
            rank_copy_RX[rank, homes + slot] = copy
    return State(
        expert_C, host_C, copies_EX, np.ones(experts, np.int64), place_C, rank_copy_RX, quota_MC, load_MR, cap_M,
        np.zeros(micro_steps, np.int64), np.empty(ranks, np.int64), np.empty(ranks, np.int64),
        np.empty(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(experts, np.int64),
        np.zeros(ranks, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip


@kernel
def attach(state: State, copy: int, expert: int) -> None:
    """Put an expert into an empty slot."""
    state.expert_C[copy] = expert
    state.copies_EX[expert, state.count_E[expert]] = copy
    state.place_C[copy] = state.count_E[expert]
    state.count_E[expert] += 1


@kernel
def detach(state: State, copy: int) -> None:
    """Empty a slot; its quotas must have gone home before."""
    expert = state.expert_C[copy]
    last = state.copies_EX[expert, state.count_E[expert] - 1]
    state.copies_EX[expert, state.place_C[copy]] = last
    state.place_C[last] = state.place_C[copy]
    state.count_E[expert] -= 1
    state.expert_C[copy] = -1


@kernel
def hosts(state: State, expert: int, rank: int) -> bool:
    """True if a rank holds a copy of an expert."""
    for position in range(state.count_E[expert]):  # noqa: SIM110 - numba knows no generators
        if state.host_C[state.copies_EX[expert, position]] == rank:
            return True
    return False


@kernel
def reach(state: State, micro_step: int, origin: int) -> int:
    """Search the residual graph from a rank: the first rank below the cap, or -1.

    With -1 the ranks marked with the new stamp are the bottleneck, listed in `queue`.
    """
    cap = state.cap_M[micro_step]
    state.stamp[0] += 1
    mark = state.stamp[0]
    state.seen_R[origin] = mark
    state.queue[0] = origin
    head, tail = 0, 1
    while head < tail:
        rank = state.queue[head]
        head += 1
        for position in range(state.rank_copy_RX.shape[1]):
            copy = state.rank_copy_RX[rank, position]
            expert = state.expert_C[copy]
            if expert < 0 or state.count_E[expert] < 2 or state.seen_E[expert] == mark:
                continue
            if state.quota_MC[micro_step, copy] == 0:
                continue
            state.seen_E[expert] = mark
            for other_position in range(state.count_E[expert]):
                other = state.copies_EX[expert, other_position]
                target = state.host_C[other]
                if state.seen_R[target] == mark:
                    continue
                state.seen_R[target] = mark
                state.out_R[target] = copy
                state.in_R[target] = other
                state.queue[tail] = target
                tail += 1
                if state.load_MR[micro_step, target] < cap:
                    return int(target)
    return -1


@kernel
def drain(state: State, micro_step: int) -> int:
    """Let excess flow out of all ranks above the cap; returns the tokens that are stuck."""
    cap = state.cap_M[micro_step]
    stuck = 0
    first_mark = state.stamp[0]
    for origin in range(state.load_MR.shape[1]):
        while state.load_MR[micro_step, origin] > cap:
            if state.closed_R[origin] > first_mark:
                break
            found = reach(state, micro_step, origin)
            if found < 0:
                # No path leaves these ranks, now or later in this drain: paths that enter never return.
                for rank in range(state.load_MR.shape[1]):
                    if state.seen_R[rank] == state.stamp[0]:
                        state.closed_R[rank] = state.stamp[0]
                break
            amount = min(state.load_MR[micro_step, origin] - cap, cap - state.load_MR[micro_step, found])
            rank = found
            while rank != origin:
                amount = min(amount, state.quota_MC[micro_step, state.out_R[rank]])
                rank = state.host_C[state.out_R[rank]]
            rank = found
            while rank != origin:
                state.quota_MC[micro_step, state.out_R[rank]] -= amount
                state.quota_MC[micro_step, state.in_R[rank]] += amount
                rank = state.host_C[state.out_R[rank]]
            state.load_MR[micro_step, origin] -= amount
            state.load_MR[micro_step, found] += amount
        stuck += max(0, state.load_MR[micro_step, origin] - cap)
    state.stuck_M[micro_step] = stuck
    return stuck


@kernel
def kept_tokens(state: State, expert: int, group: int, without: int, group_R: Ints, local_EG: Ints) -> int:
    """Tokens that a copy of `expert` in `group` could keep there and no other copy but `without` does."""
    for position in range(state.count_E[expert]):
        other = state.copies_EX[expert, position]
        if other != without and group_R[state.host_C[other]] == group:
            return 0
    kept: int = local_EG[expert, group]
    return kept


@kernel
def count_base(state: State) -> int:
    """Number of home copies, where slot copies start."""
    return state.count_E.size
