"""Replicas of one micro-step: the fewest copies that bring every rank under a cap (greedy).

While a rank is above the cap, its excess first flows over copies that exist already, on any path; only when
no path is left is a replica made: on the rank whose free room fits best, of the smallest expert that can
supply the amount, so that the big ones stay available. Copies inside the node are preferred over copies
across the network, and copies that are still resident from the last micro-step over both. Filling each
underloaded rank once from one donor takes at most R-1 copies (Walker's alias construction, with experts as
the unit; MoonEP proves the bound), so one or two slots a rank are enough in practice.

Copies live in linked lists, by expert and by rank, since they are added while paths are searched.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foremoe.planner._flow import Ints, push
from foremoe.planner._jit import kernel

_RESIDENT_WEIGHT = 1.6
_REMOTE_WEIGHT = 0.5


@kernel
def build_lists(start_E1: Ints, host_C: Ints, ranks: int, spare: int) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """(first_E, next_E, first_R, next_R, expert_C, host_C) as linked lists with room for `spare` more copies."""
    experts = start_E1.size - 1
    size = host_C.size + spare
    first_E = np.full(experts, -1, np.int64)
    first_R = np.full(ranks, -1, np.int64)
    next_E = np.full(size, -1, np.int64)
    next_R = np.full(size, -1, np.int64)
    expert_C = np.empty(size, np.int64)
    hosts_C = np.empty(size, np.int64)
    for expert in range(experts):
        for copy in range(start_E1[expert], start_E1[expert + 1]):
            rank = host_C[copy]
            expert_C[copy] = expert
            hosts_C[copy] = rank
            next_E[copy] = first_E[expert]
            first_E[expert] = copy
            next_R[copy] = first_R[rank]
            first_R[rank] = copy
    return first_E, next_E, first_R, next_R, expert_C, hosts_C


@kernel
def flow_out(
    origin: int,
    cap: int,
    quota_C: Ints,
    load_R: Ints,
    first_E: Ints,
    next_E: Ints,
    first_R: Ints,
    next_R: Ints,
    expert_C: Ints,
    host_C: Ints,
    work: Ints,
) -> bool:
    """Move excess of `origin` over existing copies to ranks below the cap; True once it has no excess."""
    queue, out_R, in_R = work[0], work[1], work[2]
    seen_R, seen_E = work[3], work[4]
    stamp = work[5]
    while load_R[origin] > cap:
        stamp[0] += 1
        mark = stamp[0]
        seen_R[origin] = mark
        queue[0] = origin
        head, tail, found = 0, 1, -1
        while head < tail and found < 0:
            rank = queue[head]
            head += 1
            copy = first_R[rank]
            while copy >= 0 and found < 0:
                expert = expert_C[copy]
                first = first_E[expert]
                if quota_C[copy] > 0 and next_E[first] >= 0 and seen_E[expert] != mark:
                    seen_E[expert] = mark
                    other = first
                    while other >= 0:
                        target = host_C[other]
                        if seen_R[target] != mark:
                            seen_R[target] = mark
                            out_R[target] = copy
                            in_R[target] = other
                            queue[tail] = target
                            tail += 1
                            if load_R[target] < cap:
                                found = target
                                break
                        other = next_E[other]
                copy = next_R[copy]
        if found < 0:
            return False
        push(origin, found, cap, quota_C, load_R, host_C, out_R, in_R)
    return True


@kernel
def choose_replica(
    donor: int,
    excess: int,
    cap: int,
    min_share: int,
    inside_only: bool,
    fill: bool,
    quota_C: Ints,
    load_R: Ints,
    free_R: Ints,
    inner_R: Ints,
    resident_RE: npt.NDArray[np.bool_],
    first_E: Ints,
    next_E: Ints,
    first_R: Ints,
    next_R: Ints,
    expert_C: Ints,
    host_C: Ints,
) -> tuple[int, int, int]:
    """(source copy, target rank, tokens) of the best new replica for a donor; source -1 if there is none."""
    best_weight = 0.0
    best_copy, best_rank, best_amount = -1, -1, 0
    sticky = resident_RE.size > 0
    for remote in range(1 if inside_only else 2):
        # Best fit: the smallest hole that takes all of the excess, else the largest hole.
        target, hole = -1, 0
        for rank in range(load_R.size):
            room = cap - load_R[rank]
            if rank == donor or free_R[rank] == 0 or room < max(min_share, 1):
                continue
            if (inner_R[rank] != inner_R[donor]) != (remote == 1):
                continue
            better = room < hole if (room >= excess and hole >= excess) else room > hole
            if target < 0 or better:
                target, hole = rank, room
        if target < 0:
            continue
        weight = 1.0 if remote == 0 else _REMOTE_WEIGHT
        want = hole if fill else min(max(excess, min_share), hole)
        copy, amount = pick_expert(donor, target, want, quota_C, first_E, next_E, first_R, next_R, expert_C, host_C)
        if 2 * amount < want:
            # The best fit holds the experts that matter already: look at all ranks.
            for rank in range(load_R.size):
                room = cap - load_R[rank]
                if rank == donor or free_R[rank] == 0 or room < max(min_share, 1):
                    continue
                if (inner_R[rank] != inner_R[donor]) != (remote == 1):
                    continue
                want = room if fill else min(max(excess, min_share), room)
                other, most = pick_expert(
                    donor, rank, want, quota_C, first_E, next_E, first_R, next_R, expert_C, host_C
                )
                if other >= 0 and most > amount:
                    copy, target, amount = other, rank, most
        amount = min(amount, max(excess, min_share))
        if copy >= 0 and amount >= min_share and amount * weight > best_weight:
            best_weight = amount * weight
            best_copy, best_rank, best_amount = copy, target, amount
    if sticky:
        copy = first_R[donor]
        while copy >= 0:
            expert = expert_C[copy]
            for rank in range(load_R.size):
                if not resident_RE[rank, expert] or free_R[rank] == 0 or rank == donor:
                    continue
                amount = min(min(max(excess, min_share), cap - load_R[rank]), quota_C[copy])
                if amount < max(min_share, 1) or amount * _RESIDENT_WEIGHT <= best_weight:
                    continue
                if hosted(expert, rank, first_E, next_E, host_C):
                    continue
                best_weight = amount * _RESIDENT_WEIGHT
                best_copy, best_rank, best_amount = copy, rank, amount
            copy = next_R[copy]
    return best_copy, best_rank, best_amount


@kernel
def hosted(expert: int, rank: int, first_E: Ints, next_E: Ints, host_C: Ints) -> bool:
    """True if `rank` holds a copy of `expert`."""
    other = first_E[expert]
    while other >= 0:
        if host_C[other] == rank:
            return True
        other = next_E[other]
    return False


@kernel
def pick_expert(
    donor: int,
    target: int,
    want: int,
    quota_C: Ints,
    first_E: Ints,
    next_E: Ints,
    first_R: Ints,
    next_R: Ints,
    expert_C: Ints,
    host_C: Ints,
) -> tuple[int, int]:
    """(copy on the donor, tokens): the smallest expert that supplies `want`, else the largest."""
    best, best_quota = -1, 0
    copy = first_R[donor]
    while copy >= 0:
        quota = quota_C[copy]
        if quota > 0 and not hosted(expert_C[copy], target, first_E, next_E, host_C):
            better = quota < best_quota if (quota >= want and best_quota >= want) else quota > best_quota
            if best < 0 or better:
                best, best_quota = copy, quota
        copy = next_R[copy]
    return best, min(want, best_quota)


@kernel
def spill(
    cap: int,
    min_share: int,
    inside_only: bool,
    fill: bool,
    slots_R: Ints,
    inner_R: Ints,
    resident_RE: npt.NDArray[np.bool_],
    start_E1: Ints,
    start_host_C: Ints,
    start_quota_C: Ints,
    start_load_R: Ints,
) -> tuple[bool, int, Ints, Ints, Ints, Ints]:
    """Bring every rank under `cap` with few replicas: (done, copies, expert_C, host_C, quota_C, load_R).

    `fill` picks experts that could fill the target's whole room, for when slots rather than copies are scarce. With
    `inside_only` replicas stay in the inner group of the rank they relieve. Starts from a layout with quotas; replicas
    are appended behind its copies. Not done means that some rank stays above the cap; the result is valid anyway.
    """
    ranks = start_load_R.size
    free_R = slots_R.copy()
    spare = free_R.sum()
    first_E, next_E, first_R, next_R, expert_C, host_C = build_lists(start_E1, start_host_C, ranks, spare)
    quota_C = np.zeros(host_C.size, np.int64)
    quota_C[: start_quota_C.size] = start_quota_C
    load_R = start_load_R.copy()
    work = np.zeros((6, max(ranks, first_E.size)), np.int64)
    copies = start_quota_C.size
    stuck_R = np.zeros(ranks, np.bool_)
    done = True
    while True:
        donor = -1
        for rank in range(ranks):
            if load_R[rank] > cap and not stuck_R[rank] and (donor < 0 or load_R[rank] > load_R[donor]):
                donor = rank
        if donor < 0:
            break
        if flow_out(donor, cap, quota_C, load_R, first_E, next_E, first_R, next_R, expert_C, host_C, work):
            continue
        source, target, amount = choose_replica(
            donor, load_R[donor] - cap, cap, min_share, inside_only, fill, quota_C, load_R, free_R, inner_R,
            resident_RE, first_E, next_E, first_R, next_R, expert_C, host_C,
        )  # fmt: skip
        if source < 0:
            # Not from here: a copy that relieves another rank of the bottleneck helps as well, through existing copies.
            excess = load_R[donor] - cap
            mark = work[5, 0]
            for member in range(ranks):
                if member != donor and work[3, member] == mark and source < 0:
                    source, target, amount = choose_replica(
                        member, excess, cap, min_share, inside_only, fill, quota_C, load_R, free_R, inner_R,
                        resident_RE, first_E, next_E, first_R, next_R, expert_C, host_C,
                    )  # fmt: skip
            amount = 0
        if source < 0:
            stuck_R[donor] = True
            done = False
            continue
        expert = expert_C[source]
        expert_C[copies] = expert
        host_C[copies] = target
        quota_C[copies] = amount
        quota_C[source] -= amount
        next_E[copies] = first_E[expert]
        first_E[expert] = copies
        next_R[copies] = first_R[target]
        first_R[target] = copies
        load_R[donor] -= amount
        load_R[target] += amount
        free_R[target] -= 1
        copies += 1
    return done, copies, expert_C[:copies], host_C[:copies], quota_C[:copies], load_R


@kernel
def sorted_layout(
    experts: int, expert_C: Ints, host_C: Ints, quota_C: Ints, kept: int, ranks: int
) -> tuple[Ints, Ints, Ints]:
    """(start_E1, host_C, quota_C) in layout order; replicas (behind the first `kept`) without tokens are left out."""
    start_E1 = np.zeros(experts + 1, np.int64)
    for copy in range(expert_C.size):
        if copy < kept or quota_C[copy] > 0:
            start_E1[expert_C[copy] + 1] += 1
    for expert in range(experts):
        start_E1[expert + 1] += start_E1[expert]
    fill_E = start_E1[:-1].copy()
    sorted_host_C = np.empty(start_E1[experts], np.int64)
    sorted_quota_C = np.empty(start_E1[experts], np.int64)
    for copy in range(expert_C.size):
        if copy < kept or quota_C[copy] > 0:
            expert = expert_C[copy]
            place = fill_E[expert]
            while place > start_E1[expert] and sorted_host_C[place - 1] > host_C[copy]:
                sorted_host_C[place] = sorted_host_C[place - 1]
                sorted_quota_C[place] = sorted_quota_C[place - 1]
                place -= 1
            sorted_host_C[place] = host_C[copy]
            sorted_quota_C[place] = quota_C[copy]
            fill_E[expert] += 1
    return start_E1, sorted_host_C, sorted_quota_C
