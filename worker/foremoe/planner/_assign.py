"""From kernels to plans: the exact assignment, and one micro-step with dynamic replicas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foremoe.planner._flow import Ints, Layout, layout_of
from foremoe.planner._micro import micro_step_tokens
from foremoe.planner._split import split_evenly, split_sources
from foremoe.planner.plan import Bools, Plan
from foremoe.topology import Topology

NO_HOSTS: Bools = np.zeros((0, 0), dtype=np.bool_)


def layout_from_hosts(hosts_RE: npt.NDArray[np.bool_]) -> Layout:
    """Flat arrays of the copies in a host matrix."""
    return Layout(*layout_of(hosts_RE))


def assign_plan(
    load_SE: Ints,
    layout: Layout,
    *,
    home_E: Ints,
    topology: Topology,
    capacity_R: Ints,
    present_RE: Bools | None = None,
) -> Plan:
    """The exact assignment as a plan; inputs are trusted."""
    # One kernel serves both: every kernel that can be entered from outside costs seconds of compilation.
    return dynamic_plan(
        load_SE,
        layout,
        home_E=home_E,
        topology=topology,
        capacity_R=capacity_R,
        slots_R=np.zeros(topology.size, np.int64),
        tolerance=0.0,
        min_share=0,
        present_RE=present_RE,
    )


def dynamic_plan(
    load_SE: Ints,
    layout: Layout,
    *,
    home_E: Ints,
    topology: Topology,
    capacity_R: Ints,
    slots_R: Ints,
    tolerance: float,
    min_share: int,
    present_RE: Bools | None,
    resident_RE: Bools | None = None,
    inside_only: bool = False,
) -> Plan:
    """The exact assignment with dynamic replicas where it leaves more than the tolerance; inputs are trusted."""
    start_E1, host_C, quota_C, load_R, row_C, split_XS = micro_step_tokens(
        load_SE,
        layout,
        topology.locality,
        slots_R,
        tolerance,
        min_share,
        inside_only,
        NO_HOSTS if resident_RE is None else resident_RE,
    )
    return Plan(
        load_SE=load_SE,
        home_E=home_E,
        start_E1=start_E1,
        host_C=host_C,
        quota_C=quota_C,
        row_C=row_C,
        split_XS=split_XS,
        rank_load_R=load_R,
        capacity_R=capacity_R,
        present_RE=present_RE,
    )


def without_small_shares(plan: Plan, least: int, topology: Topology) -> Plan:
    """The plan with every replica computing either nothing or at least `least` tokens.

    Replicas with less are taken out, the smaller half of them at a time, and the rest is assigned exactly again.
    They stay hosts (their weights are there) with a quota of zero. Homes may compute any number.
    """
    home_C = plan.home_E[plan.expert_C] == plan.host_C
    open_C = np.ones(plan.host_C.size, dtype=np.bool_)
    quota_C = plan.quota_C
    while True:
        small_C = np.flatnonzero(~home_C & (quota_C > 0) & (quota_C < least))
        if small_C.size == 0:
            break
        open_C[small_C[np.argsort(quota_C[small_C], kind="stable")[: (small_C.size + 1) // 2]]] = False
        hosts_RE = np.zeros((plan.ranks, plan.experts), dtype=np.bool_)
        hosts_RE[plan.host_C[open_C], plan.expert_C[open_C]] = True
        part = assign_plan(
            plan.load_SE,
            layout_from_hosts(hosts_RE),
            home_E=plan.home_E,
            topology=topology,
            capacity_R=plan.capacity_R,
        )
        quota_C = np.zeros_like(plan.quota_C)
        quota_C[open_C] = part.quota_C
    if quota_C is plan.quota_C:
        return plan
    row_C, split_XS = split_sources(plan.load_SE, quota_C, plan.start_E1, plan.host_C, topology.locality)
    load_R = np.zeros(plan.ranks, np.int64)
    np.add.at(load_R, plan.host_C, quota_C)
    return replace(plan, quota_C=quota_C, row_C=row_C, split_XS=split_XS, rank_load_R=load_R)


def even_plan(
    load_SE: Ints,
    count_RE: Ints,
    *,
    home_E: Ints,
    topology: Topology,
    capacity_R: Ints,
    present_RE: Bools | None = None,
) -> Plan:
    """Every source spreads its tokens evenly over the copies of an expert; `count_RE` may hold several on one rank."""
    layout = layout_from_hosts(count_RE > 0)
    quota_C, row_C, split_XS = split_evenly(load_SE, layout.start_E1, layout.host_C, count_RE)
    load_R = np.zeros(topology.size, np.int64)
    np.add.at(load_R, layout.host_C, quota_C)
    return Plan(
        load_SE=load_SE,
        home_E=home_E,
        start_E1=layout.start_E1,
        host_C=layout.host_C,
        quota_C=quota_C,
        row_C=row_C,
        split_XS=split_XS,
        rank_load_R=load_R,
        capacity_R=capacity_R,
        present_RE=present_RE,
    )
