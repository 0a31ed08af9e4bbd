"""One micro-step on given hosts: exact assignment, then dynamic replicas where it leaves too much, one kernel.

The cap to reach is the mean plus the tolerance. If the greedy cannot reach it, the exact assignment over its
replicas gives a cap that is reachable, and a short bisection between the two looks for a better set.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foremoe.planner._flow import Ints, Layout, balance, group_supply, index_of, start_local
from foremoe.planner._jit import kernel
from foremoe.planner._locality import cheapest_balance
from foremoe.planner._spill import sorted_layout, spill
from foremoe.planner._split import split_sources
from foremoe.topology import Locality

_BISECTIONS = 6


@kernel
def balanced_quotas(load_SE: Ints, load_E: Ints, layout: Layout, place: Locality) -> tuple[Ints, Ints]:
    """(quota_C, load_R) of the exact assignment on given hosts."""
    ranks = place.inner_R.size
    groups = place.inner_start.size - 1
    floor = (load_E.sum() + ranks - 1) // ranks
    supply_EG = group_supply(load_SE, layout.start_E1, place.inner_R, groups)
    if groups > 1 and layout.rank_copy.size > 0:
        return cheapest_balance(load_E, supply_EG, layout, place, floor)
    quota_C, load_R = start_local(load_E, supply_EG, layout.start_E1, layout.host_C, place)
    balance(
        quota_C,
        load_R,
        floor,
        layout.start_E1,
        layout.host_C,
        layout.expert_C,
        layout.rank_start_R1,
        layout.rank_copy,
    )
    return quota_C, load_R


@kernel
def add_replicas(
    want: int,
    min_share: int,
    inside_only: bool,
    slots_R: Ints,
    place: Locality,
    resident_RE: npt.NDArray[np.bool_],
    layout: Layout,
    quota_C: Ints,
    load_R: Ints,
) -> tuple[Ints, Ints, Ints, Ints]:
    """(start_E1, host_C, quota_C, load_R) with dynamic replicas that bring all ranks to `want`, or near it."""
    ranks = load_R.size
    experts = layout.start_E1.size - 1
    kept = layout.host_C.size
    low, high = want, load_R.max()
    best = (layout.start_E1, layout.host_C, quota_C, load_R)
    cap = want
    for _ in range(_BISECTIONS):
        reached = False
        for attempt in range(2):
            done, copies, expert_C, host_C, new_quota_C, new_load_R = spill(
                cap,
                min_share,
                inside_only,
                attempt == 1,
                slots_R,
                place.inner_R,
                resident_RE,
                layout.start_E1,
                layout.host_C,
                quota_C,
                load_R,
            )
            if copies > kept:
                start_E1, sorted_host_C, sorted_quota_C = sorted_layout(
                    experts, expert_C, host_C, new_quota_C, kept, ranks
                )
                if not done:
                    found_C, rank_start_R1, rank_copy = index_of(start_E1, sorted_host_C, ranks)
                    balance(sorted_quota_C, new_load_R, cap, start_E1, sorted_host_C, found_C, rank_start_R1, rank_copy)
                if new_load_R.max() < high:
                    high = new_load_R.max()
                    best = (start_E1, sorted_host_C, sorted_quota_C, new_load_R)
            if done:
                reached = True
                break
        if reached:
            high = min(high, cap)
        else:
            low = max(low, cap)
        if high - low <= max(1, want // 1000):
            break
        cap = (low + high) // 2
    return best


@kernel
def micro_step_tokens(
    load_SE: Ints,
    layout: Layout,
    place: Locality,
    slots_R: Ints,
    tolerance: float,
    min_share: int,
    inside_only: bool,
    resident_RE: npt.NDArray[np.bool_],
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """(start_E1, host_C, quota_C, load_R, row_C, split_XS) with dynamic replicas where they are needed."""
    load_E = load_SE.sum(axis=0)
    ranks = place.inner_R.size
    total = load_E.sum()
    start_E1, host_C = layout.start_E1, layout.host_C
    quota_C, load_R = balanced_quotas(load_SE, load_E, layout, place)
    want = max((total + ranks - 1) // ranks, int(total * (1.0 + tolerance) / ranks))
    if load_R.max() > want and slots_R.max() > 0:
        start_E1, host_C, quota_C, load_R = add_replicas(
            want, min_share, inside_only, slots_R, place, resident_RE, layout, quota_C, load_R
        )
        if place.inner_start.size > 2 and layout.rank_copy.size > 0 and min_share == 0:
            # Step replicas were split for locality; moving excess blindly undid some of that. Split again, using
            # the tolerance. Without step replicas there was little to undo, and this would double the time.
            expert_C, rank_start_R1, rank_copy = index_of(start_E1, host_C, ranks)
            full = Layout(start_E1, host_C, expert_C, rank_start_R1, rank_copy)
            supply_EG = group_supply(load_SE, start_E1, place.inner_R, place.inner_start.size - 1)
            quota_C, load_R = cheapest_balance(load_E, supply_EG, full, place, max(want, load_R.max()))
    row_C, split_XS = split_sources(load_SE, quota_C, start_E1, host_C, place)
    return start_E1, host_C, quota_C, load_R, row_C, split_XS
