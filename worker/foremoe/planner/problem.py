"""What a strategy is given: checked arrays and settings, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from foremoe.planner.base import BasePlacement
from foremoe.planner.config import PlannerConfig
from foremoe.planner.cost import CostModel, LayerLoad
from foremoe.planner.plan import Bools, Copy, Ints, Plan, StepPlan, traffic_of
from foremoe.planner.slots import slots_per_rank
from foremoe.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Settings shared by planning a micro-step and planning a step."""

    base: BasePlacement
    topology: Topology
    config: PlannerConfig

    @cached_property
    def slots_R(self) -> tuple[Ints, Ints]:
        """(step slots, dynamic slots) of every rank."""
        return slots_per_rank(self.config, self.topology)

    @property
    def home_slots(self) -> int:
        """Home experts of a rank."""
        return self.base.experts // self.base.ranks

    @property
    def capacity_R(self) -> Ints:
        """Most experts a rank may host in a micro-step."""
        step_R, dynamic_R = self.slots_R
        return self.home_slots + step_R + dynamic_R

    @cached_property
    def home_hosts_RE(self) -> Bools:
        """Hosts without any replica: bool [R, E]."""
        return homes_of(self.base)

    @cached_property
    def cost(self) -> CostModel:
        """Prices plans."""
        return CostModel(self.config.cost, self.topology)

    def seconds(self, plan: Plan) -> float:
        """Modelled time of a micro-step's plan."""
        return self.cost.layer(layer_load(plan, self.topology, self.config.cost.model.top_k)).total

    def step_seconds(self, plans: tuple[Plan, ...], hosts_RE: Bools, base: BasePlacement) -> float:
        """Modelled time of a step: its micro-steps, the push of step replicas, the moves of homes before it.

        A layer's replicas are needed when the first micro-step reaches it, so a push hides behind compute like
        any other transfer; moves stand between steps and hide behind nothing.
        """
        expert, rank = np.nonzero((hosts_RE & ~homes_of(base)).T)
        replicas = tuple(Copy(int(e), int(r)) for e, r in zip(expert, rank, strict=True))
        busiest = busiest_copies(replicas, base.home_E, self.topology)
        push = self.cost.step_push_seconds(copy_rank_experts=busiest[0], copy_network_experts=busiest[1])
        layers = [self.cost.layer(layer_load(plan, self.topology, self.config.cost.model.top_k)) for plan in plans]
        push -= self.config.cost.copy_overlap * (layers[0].expert + layers[0].dense)
        moves = base.moved_from(self.base)
        moved = tuple(Copy(int(expert), int(base.home_E[expert])) for expert in moves)
        busiest = busiest_copies(moved, self.base.home_E, self.topology)
        seconds = self.cost.move_seconds(rank_experts=busiest[0], network_experts=busiest[1])
        return max(0.0, push) + seconds + sum(layer.total for layer in layers)


@dataclass(frozen=True, kw_only=True)
class MicroProblem(Problem):
    """One layer and micro-step."""

    load_SE: Ints
    hosts_RE: Bools
    """Copies that are in place: homes and step replicas."""
    resident_RE: Bools | None = None
    """Copies that still sit in dynamic slots from the last micro-step."""


@dataclass(frozen=True, kw_only=True)
class StepProblem(Problem):
    """One layer and all micro-steps of a step."""

    load_MSE: Ints
    previous: StepPlan | None = None
    """The plan of the step before, if there was one."""


class StrategyModule(Protocol):
    """The interface of every strategy."""

    def plan_micro_step(self, problem: MicroProblem) -> Plan:
        """Replicas in dynamic slots and the assignment of one micro-step."""
        ...

    def plan_step(self, problem: StepProblem) -> StepPlan:
        """Replicas for the step and a plan for each micro-step."""
        ...


def homes_of(base: BasePlacement) -> Bools:
    """Hosts without any replica: bool [R, E]."""
    hosts = np.zeros((base.ranks, base.experts), dtype=np.bool_)
    hosts[base.home_E, np.arange(base.experts)] = True
    return hosts


def layer_load(plan: Plan, topology: Topology, top_k: int) -> LayerLoad:
    """What the cost model needs to know of a plan."""
    busiest = busiest_copies(plan.copies, plan.home_E, topology)
    return LayerLoad(
        max_rank_pairs=int(plan.rank_load_R.max()),
        max_node_pairs=traffic_of(plan, topology)[1],
        tokens_per_rank=float(plan.rank_load_R.sum()) / plan.ranks / top_k,
        copy_rank_experts=busiest[0],
        copy_network_experts=busiest[1],
    )


def busiest_copies(copies: tuple[Copy, ...], home_E: Ints, topology: Topology) -> tuple[int, int]:
    """Experts the busiest rank sends or receives: (in all, over the network)."""
    if not copies:
        return 0, 0
    expert, target = np.array(copies).T
    source = home_E[expert]
    remote = topology.domain_R[source] != topology.domain_R[target]
    size = topology.size

    def busiest(chosen: Bools) -> int:
        sent = np.bincount(source[chosen], minlength=size)
        received = np.bincount(target[chosen], minlength=size)
        return int(max(sent.max(), received.max()))

    return busiest(np.ones_like(remote)), busiest(remote)
