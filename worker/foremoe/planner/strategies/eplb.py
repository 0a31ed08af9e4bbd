"""EPLB: replicas of the experts that were hot in past steps, tokens spread evenly over copies.

Source: deepseek-ai/EPLB (its README and `rebalance_experts`, global policy: one group, one node). Copies are
added one by one to the expert with the highest load per copy; all copies are then packed by longest processing
time first, with equal counts a rank. Loads are those of past steps only, re-placed every `rebalance_steps`.

With `max_moves` 0 homes stay and only the added copies are packed, into the redundant slots; otherwise
everything may move, as in the original. Dynamic slots are not used.
"""

from __future__ import annotations

import numpy as np

from foremoe.planner._assign import even_plan
from foremoe.planner.history import past_load_E, replacement_due, with_this_step
from foremoe.planner.plan import Ints, Plan, StepPlan
from foremoe.planner.problem import MicroProblem, StepProblem


class Eplb:
    """Periodic, history-based replication with an even split."""

    def plan_micro_step(self, problem: MicroProblem) -> Plan:
        """Even split over the copies in place."""
        return even_plan(
            problem.load_SE,
            problem.hosts_RE.astype(np.int64),
            home_E=problem.base.home_E,
            topology=problem.topology,
            capacity_R=problem.capacity_R,
            present_RE=problem.hosts_RE,
        )

    def plan_step(self, problem: StepProblem) -> StepPlan:
        """Copies from past loads, even split in every micro-step."""
        count_RE, age = placed_copies(problem)
        hosts_RE = count_RE > 0
        plans = tuple(
            even_plan(
                load_SE,
                count_RE,
                home_E=problem.base.home_E,
                topology=problem.topology,
                capacity_R=problem.capacity_R,
                present_RE=hosts_RE,
            )
            for load_SE in problem.load_MSE
        )
        return StepPlan(
            base=problem.base,
            hosts_RE=hosts_RE,
            plans=plans,
            chosen="eplb",
            modelled_seconds=problem.step_seconds(plans, hosts_RE, problem.base),
            history_HE=with_this_step(problem),
            age_steps=age,
        )


def placed_copies(problem: StepProblem) -> tuple[Ints, int]:
    """(copies of every expert on every rank [R, E], steps since they were placed)."""
    past_E = past_load_E(problem)
    if past_E is None:
        return problem.home_hosts_RE.astype(np.int64), problem.config.rebalance_steps
    if not replacement_due(problem) and problem.previous is not None:
        return problem.previous.hosts_RE.astype(np.int64), problem.previous.age_steps + 1
    extra = int(problem.slots_R[0].sum())
    count_E = replica_counts(past_E, extra)
    if problem.config.max_moves == 0:
        return pack_extras(past_E, count_E, problem), 0
    return pack_copies(past_E, count_E, problem.home_slots + problem.slots_R[0]), 0


def replica_counts(load_E: Ints, extra: int) -> Ints:
    """Copies of every expert after adding `extra` one by one where load per copy is highest: int64 [E]."""
    count_E = np.ones(load_E.size, dtype=np.int64)
    for _ in range(extra):
        count_E[(load_E / count_E).argmax()] += 1
    return count_E


def pack_copies(load_E: Ints, count_E: Ints, room_R: Ints) -> Ints:
    """All copies by longest processing time first, on the least loaded rank with room: counts [R, E]."""
    copy_expert = np.repeat(np.arange(load_E.size), count_E)
    weight = (load_E / count_E)[copy_expert]
    count_RE = np.zeros((room_R.size, load_E.size), dtype=np.int64)
    load_R = np.zeros(room_R.size)
    free_R = room_R.copy()
    for copy in np.argsort(-weight, kind="stable"):
        rank = int(np.where(free_R > 0, load_R, np.inf).argmin())
        count_RE[rank, copy_expert[copy]] += 1
        load_R[rank] += weight[copy]
        free_R[rank] -= 1
    return count_RE


def pack_extras(load_E: Ints, count_E: Ints, problem: StepProblem) -> Ints:
    """Homes stay; extra copies, heaviest first, go to the least loaded rank with a free slot and no copy yet."""
    hosts = problem.home_hosts_RE.copy()
    share_E = load_E / count_E
    load_R = hosts @ share_E
    free_R = problem.slots_R[0].copy()
    extras = np.repeat(np.arange(load_E.size), count_E - 1)
    for expert in extras[np.argsort(-share_E[extras], kind="stable")]:
        allowed_R = (free_R > 0) & ~hosts[:, expert]
        if not allowed_R.any():
            continue
        rank = int(np.where(allowed_R, load_R, np.inf).argmin())
        hosts[rank, expert] = True
        load_R[rank] += share_E[expert]
        free_R[rank] -= 1
    return hosts.astype(np.int64)
