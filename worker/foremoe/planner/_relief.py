"""Few home moves that let a step do with fewer replicas.

A rank whose home experts have more tokens than the cap in some micro-step must let tokens out, so some of them need a
replica elsewhere: a set of experts whose tokens, in every micro-step, make up the excess. The smallest such sets,
added up over ranks, are a lower bound of the slots a step needs. Where homes have drifted from the
loads that bound comes close to the slots there are, and no search finds a fill. Moving a few experts
lowers it; moving for equal loads (`_homes`) does so only by accident.

The size of a smallest set is estimated greedily, with the last expert counted by the part of it that is needed, so
that the sum has a slope to descend.
"""

from __future__ import annotations

import numpy as np

from foremoe.planner._flow import Ints
from foremoe.planner._jit import kernel
from foremoe.planner._random import random_below

_FINE = 1 << 30
_HEAT = 0.5


@kernel
def replicas_needed(load_ME: Ints, home_E: Ints, rank: int, cap_M: Ints) -> float:
    """About how many home experts of a rank need a replica elsewhere."""
    micro_steps = cap_M.size
    member = np.flatnonzero(home_E == rank)
    excess_M = -cap_M
    for expert in member:
        for micro_step in range(micro_steps):
            excess_M[micro_step] += load_ME[micro_step, expert]
    needed = 0.0
    for _ in range(member.size):
        best, most = -1, 0
        for position in range(member.size):
            relief = 0
            if member[position] >= 0:
                for micro_step in range(micro_steps):
                    if excess_M[micro_step] > 0:
                        relief += min(excess_M[micro_step], load_ME[micro_step, member[position]])
            if relief > most:
                best, most = position, relief
        if best < 0:
            break
        part = 0.0
        for micro_step in range(micro_steps):
            if excess_M[micro_step] > 0:
                load = load_ME[micro_step, member[best]]
                part = max(part, min(1.0, excess_M[micro_step] / max(load, 1)))
                excess_M[micro_step] -= load
        needed += part
        member[best] = -1
    return needed


@kernel
def relieve(load_ME: Ints, start_E: Ints, cap_M: Ints, ranks: int, max_moves: int, tries: int, seed: int) -> Ints:
    """Homes with at most `max_moves` experts away from `start_E` that need few replicas (annealed swaps)."""
    experts = start_E.size
    home_E = start_E.copy()
    need_R = np.zeros(ranks)
    for rank in range(ranks):
        need_R[rank] = replicas_needed(load_ME, home_E, rank, cap_M)
    need = least = need_R.sum()
    best_E = home_E.copy()
    random = np.array([seed * 2 + 88172645463325253], np.uint64)
    moved = 0
    for used in range(tries):
        left, right = random_below(random, experts), random_below(random, experts)
        one, two = home_E[left], home_E[right]
        after = moved + (two != start_E[left]) - (one != start_E[left])
        after += (one != start_E[right]) - (two != start_E[right])
        if one == two or after > max_moves:
            continue
        home_E[left], home_E[right] = two, one
        need_one = replicas_needed(load_ME, home_E, one, cap_M)
        need_two = replicas_needed(load_ME, home_E, two, cap_M)
        total = need - need_R[one] - need_R[two] + need_one + need_two
        chance = (random_below(random, _FINE) + 1) / _FINE
        if total <= need - np.log(chance) * _HEAT * (1.0 - used / tries):
            need, need_R[one], need_R[two], moved = total, need_one, need_two, after
            if need < least - 1e-9:
                least = need
                best_E[:] = home_E
        else:
            home_E[left], home_E[right] = one, two
    return best_E
