"""Which change the search for step replicas tries next, drawn from a bottleneck of a micro-step that is not balanced.

Three kinds. Another expert for a slot outside the bottleneck lets tokens out. Where nearly every slot is needed
that takes one away where it is missed, so two slots may also exchange their experts: which experts
have replicas stays, only where they are changes. And two homes may swap, a heavy expert leaving the bottleneck for
a light one; once all moves are used, an earlier one is taken back in the same try.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foremoe.planner._flow import Ints
from foremoe.planner._jit import kernel
from foremoe.planner._random import random_below
from foremoe.planner._search_state import State, count_base, hosts, kept_tokens, reach


@kernel
def draw_bottleneck(state: State, random: npt.NDArray[np.uint64]) -> tuple[int, int]:
    """(micro-step, stamp) of a random bottleneck, whose ranks carry the stamp in seen_R; stamp -1 if there is none."""
    micro_steps, ranks = state.load_MR.shape
    micro_step = random_below(random, micro_steps)
    for _ in range(micro_steps):
        if state.stuck_M[micro_step] > 0:
            break
        micro_step = (micro_step + 1) % micro_steps
    origin = random_below(random, ranks)
    for _ in range(ranks):
        if state.load_MR[micro_step, origin] > state.cap_M[micro_step]:
            break
        origin = (origin + 1) % ranks
    if reach(state, micro_step, origin) >= 0:
        return micro_step, -1
    return micro_step, state.stamp[0]


@kernel
def pick_inside(state: State, random: npt.NDArray[np.uint64], mark: int) -> int:
    """A random rank of the last bottleneck."""
    ranks = state.seen_R.size
    rank = random_below(random, ranks)
    while state.seen_R[rank] != mark:
        rank = (rank + 1) % ranks
    return rank


@kernel
def propose_repair(
    state: State, random: npt.NDArray[np.uint64], slots_R: Ints, slots: int, value_C: Ints
) -> tuple[int, int]:
    """(slot copy, expert) that gives a stuck micro-step a way out of its bottleneck; (-1, -1) if the draw fails."""
    micro_step, mark = draw_bottleneck(state, random)
    if mark < 0:
        return -1, -1
    ranks = slots_R.size
    origin = state.queue[0]
    # Of a few draws, the copy with most tokens inside the bottleneck: it can carry most out.
    expert, most = -1, 0
    width = state.rank_copy_RX.shape[1]
    for _ in range(3):
        rank = origin if random_below(random, 2) == 0 else pick_inside(state, random, mark)
        copy = state.rank_copy_RX[rank, random_below(random, width)]
        if state.expert_C[copy] >= 0 and state.quota_MC[micro_step, copy] > most:
            expert, most = state.expert_C[copy], state.quota_MC[micro_step, copy]
    if expert < 0:
        return -1, -1
    # Of a few ranks outside, the one whose slot is cheapest to give up.
    target, cheapest = -1, 0
    for _ in range(4):
        rank = random_below(random, ranks)
        if state.seen_R[rank] == mark or slots_R[rank] == 0 or hosts(state, expert, rank):
            continue
        copy = count_base(state) + rank * slots + random_below(random, slots_R[rank])
        if target < 0 or value_C[copy] < cheapest:
            target, cheapest = copy, value_C[copy]
    return target, expert


@kernel
def propose_exchange(state: State, random: npt.NDArray[np.uint64], slots_R: Ints, slots: int) -> tuple[int, int]:
    """Two slots to exchange: one inside a bottleneck whose expert has tokens there, one outside; (-1, -1) if none."""
    micro_step, mark = draw_bottleneck(state, random)
    if mark < 0:
        return -1, -1
    ranks = slots_R.size
    left, most = -1, 0
    for _ in range(4):
        rank = pick_inside(state, random, mark)
        if slots_R[rank] == 0:
            continue
        copy = count_base(state) + rank * slots + random_below(random, slots_R[rank])
        expert = state.expert_C[copy]
        if expert < 0:
            continue
        inside = state.quota_MC[micro_step, copy]
        if state.seen_R[state.host_C[expert]] == mark:
            inside += state.quota_MC[micro_step, expert]
        if inside > most:
            left, most = copy, inside
    if left < 0:
        return -1, -1
    for _ in range(6):
        rank = random_below(random, ranks)
        if state.seen_R[rank] == mark or slots_R[rank] == 0:
            continue
        right = count_base(state) + rank * slots + random_below(random, slots_R[rank])
        if state.expert_C[right] < 0 or state.expert_C[right] == state.expert_C[left]:
            continue
        if hosts(state, state.expert_C[left], rank) or hosts(state, state.expert_C[right], state.host_C[left]):
            continue
        return left, right
    return -1, -1


@kernel
def propose_swap(
    state: State, random: npt.NDArray[np.uint64], home_E: Ints, moved: int, max_moves: int
) -> tuple[int, int, int, int]:
    """Two experts whose homes to swap, one inside a bottleneck and one outside, all -1 if the draw fails.

    If the moves are used up two more follow, whose homes swap first: an earlier move is taken back. Else -1, -1.
    """
    none = (-1, -1, -1, -1)
    micro_step, mark = draw_bottleneck(state, random)
    if mark < 0:
        return none
    experts = count_base(state)
    left, most = -1, 0
    for _ in range(6):
        expert = random_below(random, experts)
        if state.seen_R[state.host_C[expert]] == mark and state.quota_MC[micro_step, expert] > most:
            left, most = expert, state.quota_MC[micro_step, expert]
    right, least = -1, most
    for _ in range(6):
        expert = random_below(random, experts)
        if state.seen_R[state.host_C[expert]] != mark and state.quota_MC[micro_step, expert] < least:
            right, least = expert, state.quota_MC[micro_step, expert]
    if left < 0 or right < 0:
        return none
    one, two = state.host_C[left], state.host_C[right]
    if hosts(state, left, two) or hosts(state, right, one):
        return none
    after = moved + away_after(state, home_E, left, right)
    if after <= max_moves:
        return left, right, -1, -1
    back, forth = propose_return(state, random, home_E)
    if back < 0 or back in (left, right) or forth in (left, right):
        return none
    after += away_after(state, home_E, back, forth)
    return (left, right, back, forth) if after <= max_moves else none


@kernel
def away_after(state: State, home_E: Ints, left: int, right: int) -> int:
    """How many more experts are away from `home_E` once the homes of two have swapped."""
    one, two = state.host_C[left], state.host_C[right]
    before = int(one != home_E[left]) + int(two != home_E[right])
    return int(two != home_E[left]) + int(one != home_E[right]) - before


@kernel
def propose_return(state: State, random: npt.NDArray[np.uint64], home_E: Ints) -> tuple[int, int]:
    """An expert that is away, and one it swaps homes with to return; (-1, -1) if the draw fails.

    Rather one that is away, too, rather still one that returns by the same swap.
    """
    experts = home_E.size
    back = random_below(random, experts)
    for _ in range(experts):
        if state.host_C[back] != home_E[back]:
            break
        back = (back + 1) % experts
    rank, goal = state.host_C[back], home_E[back]
    forth, best, seen = -1, 0, 0
    for position in range(state.rank_copy_RX.shape[1]):
        expert = state.rank_copy_RX[goal, position]
        if expert >= experts:
            continue
        grade = 1 + int(home_E[expert] != goal) + int(home_E[expert] == rank)
        seen = seen + 1 if grade == best else 1
        if grade > best or (grade == best and random_below(random, seen) == 0):
            forth, best = expert, grade
    if rank == goal or hosts(state, back, goal) or hosts(state, forth, rank):
        return -1, -1
    return back, forth


@kernel
def propose_local(
    state: State,
    random: npt.NDArray[np.uint64],
    slots_R: Ints,
    slots: int,
    value_C: Ints,
    group_R: Ints,
    local_EG: Ints,
) -> tuple[int, int]:
    """(slot copy, expert) that would keep more tokens in the slot's group."""
    ranks = group_R.size
    copy, value = -1, 0
    for _ in range(4):
        rank = random_below(random, ranks)
        if slots_R[rank] > 0:
            other = count_base(state) + rank * slots + random_below(random, slots_R[rank])
            if copy < 0 or value_C[other] < value:
                copy, value = other, value_C[other]
    if copy < 0:
        return -1, -1
    rank = state.host_C[copy]
    expert, best = -1, value
    for _ in range(12):
        candidate = random_below(random, state.count_E.size)
        if local_EG[candidate, group_R[rank]] > best and not hosts(state, candidate, rank):
            kept = kept_tokens(state, candidate, group_R[rank], copy, group_R, local_EG)
            if kept > best:
                expert, best = candidate, kept
    return (copy, expert) if expert >= 0 else (-1, -1)
