"""The planner's public functions: check the input, hand it to the strategy.

Everything here is deterministic, keeps no state between calls and works on copies or read-only views of its
arguments. Errors are PlannerError and name layer, expert or rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foremoe.errors import PlannerError
from foremoe.planner._assign import assign_plan, layout_from_hosts
from foremoe.planner.base import BasePlacement
from foremoe.planner.checks import check_base, checked_hosts, checked_load
from foremoe.planner.config import PlannerConfig
from foremoe.planner.homes import refined_homes
from foremoe.planner.plan import Bools, Plan, StepPlan
from foremoe.planner.problem import MicroProblem, StepProblem, homes_of
from foremoe.planner.strategies import STRATEGIES
from foremoe.topology import Topology


def assign(load_SE: npt.ArrayLike, hosts_RE: npt.ArrayLike, *, topology: Topology) -> Plan:
    """Split the tokens of every (source, expert) over its copies, exactly.

    Minimal maximum rank load, then fewest cross-domain, then fewest cross-node tokens. `load_SE` integer
    [S, E] with S = R, `hosts_RE` bool [R, E]. The first host of an expert is taken as its home in the plan.
    Raises PlannerError for bad shapes, negative loads or an expert without a host.
    """
    load = checked_load(load_SE, axes="SE", topology=topology)
    hosts = checked_hosts(hosts_RE, experts=load.shape[1], topology=topology)
    return assign_plan(
        load,
        layout_from_hosts(hosts),
        home_E=hosts.argmax(axis=0).astype(np.int64),
        topology=topology,
        capacity_R=hosts.sum(axis=1).astype(np.int64),
        present_RE=hosts,
    )


def plan_micro_step(
    load_SE: npt.ArrayLike,
    *,
    base: BasePlacement,
    topology: Topology,
    config: PlannerConfig,
    hosts_RE: Bools | None = None,
    resident_RE: Bools | None = None,
) -> Plan:
    """Replicas and assignment of one layer and micro-step, using `config.dynamic_slots` a rank.

    `hosts_RE` (bool [R, E]) are copies in place already, homes included (default: the homes alone);
    `resident_RE` are copies left in dynamic slots by the last micro-step, preferred where they help.
    """
    load = checked_load(load_SE, axes="SE", topology=topology)
    check_base(base, experts=load.shape[1], topology=topology)
    problem = MicroProblem(
        base=base,
        topology=topology,
        config=config,
        load_SE=load,
        hosts_RE=_hosts(hosts_RE, base, topology),
        resident_RE=None if resident_RE is None else _same_shape(resident_RE, base),
    )
    return STRATEGIES[config.strategy].plan_micro_step(problem)


def plan_step(
    load_MSE: npt.ArrayLike,
    *,
    base: BasePlacement,
    topology: Topology,
    config: PlannerConfig,
    previous: StepPlan | None = None,
) -> StepPlan:
    """Step replicas (`config.redundant_slots`) of one layer and a plan for each of its micro-steps.

    `previous` is the layer's plan of the step before: history for strategies that look back, and the plan
    to keep when a new one is not worth it. With `config.max_moves` other than 0 homes may change; the
    result's `base` is then in force for this step, and `moves` lists the experts to move before it.
    """
    load = checked_load(load_MSE, axes="MSE", topology=topology)
    check_base(base, experts=load.shape[2], topology=topology)
    if previous is not None:
        check_base(previous.base, experts=load.shape[2], topology=topology)
    problem = StepProblem(base=base, topology=topology, config=config, load_MSE=load, previous=previous)
    return STRATEGIES[config.strategy].plan_step(problem)


def optimize_base(
    load_MSE: npt.ArrayLike, *, topology: Topology, config: PlannerConfig, start: BasePlacement | None = None
) -> BasePlacement:
    """Homes that leave least for replicas to repair, over the micro-steps given (a step, or a window of steps).

    At most `config.max_moves` experts leave their home in `start` (default: contiguous homes; None: no
    limit). Never worse than `start` under its objective, tokens above the mean load on ranks and nodes.
    """
    load = checked_load(load_MSE, axes="MSE", topology=topology)
    experts = load.shape[2]
    if start is None:
        start = BasePlacement.contiguous(experts=experts, ranks=topology.size)
    check_base(start, experts=experts, topology=topology)
    return refined_homes(load.sum(axis=1), start=start, topology=topology, max_moves=config.max_moves, seed=config.seed)


def warm_up(*, experts: int = 4, ranks: int = 2) -> None:
    """Compile or load all kernels, so that the first real call does not pay for it.

    Takes about half a minute of one core on a machine that never ran the planner, and well under a second
    afterwards. Sizes do not matter.
    """
    topology = Topology.uniform(ranks=ranks, ranks_per_node=1)
    base = BasePlacement.contiguous(experts=experts, ranks=ranks)
    load = np.arange(2 * ranks * experts, dtype=np.int64).reshape(2, ranks, experts) ** 2 * 1000
    for strategy in STRATEGIES:
        config = PlannerConfig(
            strategy=strategy, redundant_slots=1, dynamic_slots=1, max_moves=experts // 2, search_moves=10
        )
        previous = plan_step(load, base=base, topology=topology, config=config)
        plan_step(load, base=base, topology=topology, config=config, previous=previous)
    plan_micro_step(load[1], base=base, topology=topology, config=PlannerConfig(dynamic_slots=1))
    optimize_base(load, topology=topology, config=PlannerConfig(max_moves=None))


def _hosts(hosts_RE: Bools | None, base: BasePlacement, topology: Topology) -> Bools:
    homes = homes_of(base)
    if hosts_RE is None:
        return homes
    return checked_hosts(hosts_RE, experts=base.experts, topology=topology) | homes


def _same_shape(hosts_RE: Bools, base: BasePlacement) -> Bools:
    hosts = np.asarray(hosts_RE)
    if hosts.shape != (base.ranks, base.experts) or hosts.dtype != np.bool_:
        raise PlannerError(f"resident hosts must be bool [{base.ranks}, {base.experts}]")
    return hosts
