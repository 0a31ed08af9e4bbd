"""Exact assignment for given hosts: a flow from experts over their copies into ranks.

Minimal max rank load is a maximum flow with integral optimum; the smallest cap equals, over all rank sets
A, the largest ceil(load of experts hosted only inside A / |A|) (min-cut; FineMoE, arXiv 2511.16947, uses the
same density). `balance` raises the cap exactly along those sets: it moves tokens on shortest augmenting paths
from ranks above the cap to ranks below it, and where no path is left the ranks reached form such a set A,
whose density is the next cap. So a few augmentations replace a bisection over caps, and any earlier
solution is a valid start.

`localise` then lowers, at that cap, first the tokens that leave their NVLink domain, then those that leave
their node, by cancelling negative cycles until none is left (Klein), which is optimal. The cost of a copy
depends only on the group a token comes from, so sources are summed by group and the network has
a few hundred arcs.

A *layout* is the copies of all experts as flat arrays: copies of expert e are start_E1[e]:start_E1[e+1], by
rank; `rank_start_R1`/`rank_copy` list, by rank, the copies of experts that have several hosts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foremoe.planner._jit import kernel
from foremoe.topology import Locality

Ints = npt.NDArray[np.int64]


class Layout(NamedTuple):
    """Copies of all experts of a layer as flat arrays, see the module docstring."""

    start_E1: Ints
    host_C: Ints
    expert_C: Ints
    rank_start_R1: Ints
    rank_copy: Ints


@kernel
def layout_of(hosts_RE: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Layout arrays of a host matrix, bool [R, E]."""
    ranks, experts = hosts_RE.shape
    start_E1 = np.zeros(experts + 1, np.int64)
    for rank in range(ranks):
        for expert in range(experts):
            if hosts_RE[rank, expert]:
                start_E1[expert + 1] += 1
    for expert in range(experts):
        start_E1[expert + 1] += start_E1[expert]
    fill_E = start_E1[:-1].copy()
    host_C = np.empty(start_E1[experts], np.int64)
    for rank in range(ranks):
        for expert in range(experts):
            if hosts_RE[rank, expert]:
                host_C[fill_E[expert]] = rank
                fill_E[expert] += 1
    expert_C, rank_start_R1, rank_copy = index_of(start_E1, host_C, ranks)
    return start_E1, host_C, expert_C, rank_start_R1, rank_copy


@kernel
def index_of(start_E1: Ints, host_C: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
    """expert_C, rank_start_R1 and rank_copy of copies in expert order."""
    experts = start_E1.size - 1
    expert_C = np.empty(host_C.size, np.int64)
    rank_start_R1 = np.zeros(ranks + 1, np.int64)
    for expert in range(experts):
        several = start_E1[expert + 1] - start_E1[expert] > 1
        for copy in range(start_E1[expert], start_E1[expert + 1]):
            expert_C[copy] = expert
            if several:
                rank_start_R1[host_C[copy] + 1] += 1
    for rank in range(ranks):
        rank_start_R1[rank + 1] += rank_start_R1[rank]
    fill_R = rank_start_R1[:-1].copy()
    rank_copy = np.empty(rank_start_R1[ranks], np.int64)
    for expert in range(experts):
        if start_E1[expert + 1] - start_E1[expert] > 1:
            for copy in range(start_E1[expert], start_E1[expert + 1]):
                rank = host_C[copy]
                rank_copy[fill_R[rank]] = copy
                fill_R[rank] += 1
    return expert_C, rank_start_R1, rank_copy


@kernel
def group_supply(load_SE: Ints, start_E1: Ints, inner_R: Ints, groups: int) -> Ints:
    """Tokens of every expert by the group they come from; only filled for experts with several hosts: [E, G]."""
    sources, experts = load_SE.shape
    supply_EG = np.zeros((experts, groups), np.int64)
    for expert in range(experts):
        if start_E1[expert + 1] - start_E1[expert] > 1:
            for source in range(sources):
                supply_EG[expert, inner_R[source]] += load_SE[source, expert]
    return supply_EG


@kernel
def start_local(load_E: Ints, supply_EG: Ints, start_E1: Ints, host_C: Ints, place: Locality) -> tuple[Ints, Ints]:
    """The cheapest split if ranks had no limit: (quota_C, load_R).

    Tokens go to a copy in their inner group where there is one, else in their outer group, else anywhere; within
    each choice the least loaded copies are filled to a common level.
    """
    inner_R, outer_R = place.inner_R, place.outer_R
    ranks = inner_R.size
    experts = load_E.size
    quota_C = np.zeros(host_C.size, np.int64)
    load_R = np.zeros(ranks, np.int64)
    for expert in range(experts):
        first = start_E1[expert]
        if start_E1[expert + 1] - first == 1:
            quota_C[first] = load_E[expert]
            load_R[host_C[first]] += load_E[expert]
    for expert in range(experts):
        first, last = start_E1[expert], start_E1[expert + 1]
        if last - first == 1 or load_E[expert] == 0:
            continue
        rest = load_E[expert]
        for copy in range(first, last):
            group = inner_R[host_C[copy]]
            if first_in_group(copy, first, inner_R, host_C):
                local = supply_EG[expert, group]
                level(local, copy, last, group, inner_R, quota_C, host_C, load_R)
                rest -= local
        if place.outer_price > 0:
            for copy in range(first, last):
                group = outer_R[host_C[copy]]
                if first_in_group(copy, first, outer_R, host_C):
                    near = 0
                    for inner in range(supply_EG.shape[1]):
                        if place.outer_of_inner[inner] == group and not has_copy(inner, first, last, inner_R, host_C):
                            near += supply_EG[expert, inner]
                    level(near, copy, last, group, outer_R, quota_C, host_C, load_R)
                    rest -= near
        level(rest, first, last, -1, inner_R, quota_C, host_C, load_R)
    return quota_C, load_R


@kernel
def has_copy(group: int, first: int, last: int, group_R: Ints, host_C: Ints) -> bool:
    """True if one of the copies first:last is in a group."""
    for copy in range(first, last):  # noqa: SIM110 - numba knows no generators
        if group_R[host_C[copy]] == group:
            return True
    return False


@kernel
def first_in_group(copy: int, first: int, group_R: Ints, host_C: Ints) -> bool:
    """True if no copy of the expert before this one is in its group."""
    return not has_copy(group_R[host_C[copy]], first, copy, group_R, host_C)


@kernel
def level(
    amount: int, begin: int, end: int, group: int, group_R: Ints, quota_C: Ints, host_C: Ints, load_R: Ints
) -> None:
    """Add `amount` tokens to the copies begin:end in a group (-1: any), filling the least loaded to a common level."""
    if amount <= 0:
        return
    order = np.empty(end - begin, np.int64)
    count = 0
    for copy in range(begin, end):
        if group < 0 or group_R[host_C[copy]] == group:
            place = count
            while place > 0 and load_R[host_C[order[place - 1]]] > load_R[host_C[copy]]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = copy
            count += 1
    total = amount
    used = 0
    height = 0
    while used < count:
        total += load_R[host_C[order[used]]]
        used += 1
        height = total // used
        if used < count and load_R[host_C[order[used]]] >= height:
            break
    left = amount
    for position in range(used):
        copy = order[position]
        take = min(left, max(height - load_R[host_C[copy]], 0))
        quota_C[copy] += take
        load_R[host_C[copy]] += take
        left -= take
    position = 0
    while left > 0:
        copy = order[position % used]
        quota_C[copy] += 1
        load_R[host_C[copy]] += 1
        left -= 1
        position += 1


@kernel
def push(origin: int, found: int, cap: int, quota_C: Ints, load_R: Ints, host_C: Ints, out_R: Ints, in_R: Ints) -> None:
    """Move what fits from `origin` to `found`, which is below the cap, along the path that a search left.

    Rank r of the path was reached from the host of copy `out_R[r]` through its own copy `in_R[r]`.
    """
    amount = min(load_R[origin] - cap, cap - load_R[found])
    rank = found
    while rank != origin:
        amount = min(amount, quota_C[out_R[rank]])
        rank = host_C[out_R[rank]]
    rank = found
    while rank != origin:
        quota_C[out_R[rank]] -= amount
        quota_C[in_R[rank]] += amount
        rank = host_C[out_R[rank]]
    load_R[origin] -= amount
    load_R[found] += amount


@kernel
def balance(
    quota_C: Ints,
    load_R: Ints,
    cap: int,
    start_E1: Ints,
    host_C: Ints,
    expert_C: Ints,
    rank_start_R1: Ints,
    rank_copy: Ints,
) -> int:
    """Lower all rank loads to the smallest feasible cap >= `cap`, changing quota_C and load_R in place.

    Returns that cap: max(load_R) <= result, and no assignment has a smaller maximum unless it is below the
    `cap` passed in.
    """
    ranks = load_R.size
    experts = start_E1.size - 1
    seen_R = np.full(ranks, -1, np.int64)
    seen_E = np.full(experts, -1, np.int64)
    out_R = np.empty(ranks, np.int64)
    in_R = np.empty(ranks, np.int64)
    queue = np.empty(ranks, np.int64)
    stamp = 0
    for origin in range(ranks):
        while load_R[origin] > cap:
            seen_R[origin] = stamp
            queue[0] = origin
            head, tail = 0, 1
            found = -1
            while head < tail and found < 0:
                rank = queue[head]
                head += 1
                for position in range(rank_start_R1[rank], rank_start_R1[rank + 1]):
                    copy = rank_copy[position]
                    expert = expert_C[copy]
                    if quota_C[copy] == 0 or seen_E[expert] == stamp:
                        continue
                    seen_E[expert] = stamp
                    for other in range(start_E1[expert], start_E1[expert + 1]):
                        target = host_C[other]
                        if seen_R[target] == stamp:
                            continue
                        seen_R[target] = stamp
                        out_R[target] = copy
                        in_R[target] = other
                        queue[tail] = target
                        tail += 1
                        if load_R[target] < cap:
                            found = target
                            break
                    if found >= 0:
                        break
            stamp += 1
            if found < 0:
                # Everything on the ranks reached must stay on them: their mean is a lower bound of the cap.
                total = 0
                for position in range(tail):
                    total += load_R[queue[position]]
                cap = max(cap, (total + tail - 1) // tail)
                continue
            push(origin, found, cap, quota_C, load_R, host_C, out_R, in_R)
    return cap
