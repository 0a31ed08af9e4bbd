"""LPLB: fixed replicas along a graph of ranks, tokens split optimally in every micro-step.

Source: deepseek-ai/LPLB (README and code): the heaviest experts of a rank, by past loads, are copied to its
neighbours in a fixed graph, so a replicated expert has exactly two hosts; per batch a linear program
picks the share of each edge such that the largest rank load is minimal. Here the graph is the hypercube where
the number of ranks is a power of two, else a ring with doubling strides, with one dimension per redundant slot;
the program is solved exactly and in integers by the same flow as everywhere (`assign`).

Homes are re-ordered once from history (longest processing time first) unless `max_moves` is 0.
"""

from __future__ import annotations

import numpy as np

from foremoe.planner._assign import assign_plan, layout_from_hosts
from foremoe.planner._homes import longest_first
from foremoe.planner.base import BasePlacement
from foremoe.planner.history import past_load_E, replacement_due, with_this_step
from foremoe.planner.plan import Bools, Ints, Plan, StepPlan
from foremoe.planner.problem import MicroProblem, StepProblem, homes_of


class Lplb:
    """Replicas on graph edges from history, exact split."""

    def plan_micro_step(self, problem: MicroProblem) -> Plan:
        """Exact split over the copies in place."""
        return assign_plan(
            problem.load_SE,
            layout_from_hosts(problem.hosts_RE),
            home_E=problem.base.home_E,
            topology=problem.topology,
            capacity_R=problem.capacity_R,
            present_RE=problem.hosts_RE,
        )

    def plan_step(self, problem: StepProblem) -> StepPlan:
        """Copies from past loads, exact split in every micro-step."""
        past_E = past_load_E(problem)
        previous = problem.previous
        base, hosts_RE, age = problem.base, problem.home_hosts_RE, problem.config.rebalance_steps
        if past_E is not None and previous is not None:
            if replacement_due(problem):
                base = reordered(problem, past_E)
                hosts_RE, age = edge_copies(base, past_E, problem.slots_R[0]), 0
            else:
                base, hosts_RE, age = previous.base, previous.hosts_RE, previous.age_steps + 1
        layout = layout_from_hosts(hosts_RE)
        plans = tuple(
            assign_plan(
                load_SE,
                layout,
                home_E=base.home_E,
                topology=problem.topology,
                capacity_R=problem.capacity_R,
                present_RE=hosts_RE,
            )
            for load_SE in problem.load_MSE
        )
        return StepPlan(
            base=base,
            hosts_RE=hosts_RE,
            plans=plans,
            chosen="lplb",
            modelled_seconds=problem.step_seconds(plans, hosts_RE, base),
            moves=base.moved_from(problem.base),
            history_HE=with_this_step(problem),
            age_steps=age,
        )


def reordered(problem: StepProblem, past_E: Ints) -> BasePlacement:
    """Homes by longest processing time first, or as they are where they may not move."""
    if problem.config.max_moves == 0:
        return problem.base
    homes = BasePlacement(home_E=longest_first(past_E, problem.base.ranks), ranks=problem.base.ranks)
    limit = problem.config.max_moves
    within = limit is None or homes.moved_from(problem.base).size <= limit
    return homes if within else problem.base


def neighbour(rank: int, dimension: int, ranks: int) -> int:
    """The rank whose experts are copied to `rank` in one dimension of the graph."""
    stride = 1 << dimension
    if ranks & (ranks - 1) == 0:
        return rank ^ (stride % ranks)
    return (rank + stride) % ranks


def edge_copies(base: BasePlacement, past_E: Ints, slots_R: Ints) -> Bools:
    """Slot k of a rank holds the k-th heaviest expert of its neighbour in dimension k: bool [R, E]."""
    hosts = homes_of(base)
    for rank in range(base.ranks):
        for slot in range(int(slots_R[rank])):
            other = neighbour(rank, slot, base.ranks)
            owned = np.flatnonzero(base.home_E == other)
            if slot < owned.size:
                hosts[rank, owned[np.argsort(-past_E[owned], kind="stable")][slot]] = True
    return hosts
