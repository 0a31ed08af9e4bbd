"""Balance, copies and traffic: dynamic slots, step slots, both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foremoe.planner import BasePlacement, PlannerConfig, plan_micro_step, plan_step
from foremoe.planner.oracle import fewest_copies_bound, least_missed
from foremoe.planner.plan import StepPlan
from foremoe.planner.problem import StepProblem
from foremoe.planner.replicas import search_replicas
from foremoe.planner.strategies.foremoe import priced_step
from foremoe.routing.generator import Skew
from foremoe.topology import Topology
from planner_pieces.cells import Cell
from planner_pieces.loads import NODE, ONLY_BALANCE, Scale, cases, machine, refined, spread


def dynamic(scale: Scale) -> Iterator[Cell]:
    """Two dynamic slots, no step replicas."""
    exact_balance = PlannerConfig(redundant_slots=0, dynamic_slots=2, cost=ONLY_BALANCE)
    tolerant = exact_balance.model_copy(update={"tolerance": 0.03})
    for base_name, must, goal in (("refined", (1.01, 1.03), 1.003), ("contiguous", (1.03, 1.05), 1.01)):
        for skew in (Skew.MEDIUM, Skew.STRONG):
            for experts, ranks in scale.sizes:
                topology = machine(ranks)
                values: list[float] = []
                ratios: list[float] = []
                for _, load, _ in cases(scale, experts, ranks, skew):
                    base = BasePlacement.contiguous(experts=experts, ranks=ranks)
                    if base_name == "refined":
                        base = refined(load, topology)
                    for load_SE in load:
                        plans = [
                            plan_micro_step(load_SE, base=base, topology=topology, config=config)
                            for config in (exact_balance, tolerant)
                        ]
                        values.append(plans[0].imbalance)
                        ratios.append(_copies_over_bound(load_SE, base, len(plans[1].copies)))
                mean, p95, most = spread(values)
                name = f"{base_name} E{experts} EP{ranks} {skew}"
                yield Cell("dynamic", f"{name}: p95", p95, must[0], goal)
                yield Cell("dynamic", f"{name}: max", most, must[1], None, note=f"mean {mean:.4f}")
                if base_name == "refined":
                    ratio = float(np.nanmean(ratios)) if not np.isnan(ratios).all() else 1.0
                    yield Cell("dynamic", f"{name}: copies over lower bound, 3 %", ratio, None, 1.2)


def _copies_over_bound(load_SE: np.ndarray, base: BasePlacement, copies: int) -> float:
    load_E = load_SE.sum(axis=0)
    load_R = np.bincount(base.home_E, weights=load_E, minlength=base.ranks).astype(np.int64)
    cap = int(load_E.sum() * 1.03 / base.ranks)
    bound = fewest_copies_bound(load_R, [load_E[base.home_E == rank] for rank in range(base.ranks)], cap)
    return copies / bound if bound else float("nan")


def step(scale: Scale) -> Iterator[Cell]:
    """Two step slots, nothing moves within micro-steps."""
    bars = {
        "same": {Skew.MEDIUM: (1.01, 1.002), Skew.STRONG: (1.02, 1.01), "max": (1.05, 1.015)},
        "before": {Skew.MEDIUM: (1.02, 1.01), Skew.STRONG: (1.03, 1.01), "max": (1.06, 1.02)},
        "contiguous": {Skew.MEDIUM: (1.02, None), Skew.STRONG: (None, 1.05), "max": (None, None)},
    }
    titles = {
        "same": "homes refined on the same step",
        "before": "homes refined on the step before, then at most 5 % moved",
        "contiguous": "homes fixed, contiguous",
    }
    for mode, bar in bars.items():
        for skew in (Skew.MEDIUM, Skew.STRONG):
            for experts, ranks in scale.sizes:
                topology = machine(ranks)
                values: list[float] = []
                cross = static_cross = moves = missed = 0
                for before, load, _ in cases(scale, experts, ranks, skew):
                    contiguous = BasePlacement.contiguous(experts=experts, ranks=ranks)
                    base, limit = contiguous, 0
                    if mode == "before":
                        base, limit = refined(before, topology), experts // 20
                    elif mode == "same":
                        base, limit = refined(load, topology), None
                    plan = balanced_step(load, base, topology, base.experts if limit is None else limit)
                    values += list(plan.imbalance_M)
                    moves += plan.moves.size
                    if mode == "contiguous":
                        missed += _must_miss(load, plan, next(one for one in bar[skew] if one is not None))
                    cross += sum(micro.crossing(topology.node_R) for micro in plan.plans)
                    static = plan_step(
                        load, base=contiguous, topology=topology, config=PlannerConfig(strategy="static")
                    )
                    static_cross += sum(micro.crossing(topology.node_R) for micro in static.plans)
                mean, p95, most = spread(values)
                must, goal = bar[skew]
                name = f"{titles[mode]}, E{experts} EP{ranks} {skew}"
                note = f"mean {mean:.4f}, {moves / experts / scale.seeds / scale.layers:.1%} of experts moved"
                if missed:
                    note += f"; at least {missed} of {len(values)} micro-steps must miss it"
                yield Cell("step", f"{name}: p95", p95, must, goal, note=note)
                yield Cell("step", f"{name}: max", most, *bar["max"])
                if ranks > NODE and mode == "contiguous":
                    must_cross = 0.95 if experts == 128 else 0.97
                    yield Cell("step", f"{name}: cross-node tokens over static", cross / static_cross, must_cross, 0.85)


def _must_miss(load: np.ndarray, plan: StepPlan, limit: float) -> int:
    """Micro-steps of a layer that no fill of two slots a rank brings under `limit`; counted where the plan misses."""
    if float(np.quantile(plan.imbalance_M, 0.95)) <= limit:
        return 0
    return least_missed(
        load.sum(axis=1), plan.base.home_E, slots_R=np.full(plan.base.ranks, 2), limit=limit, seconds=5.0
    )


def balanced_step(load: np.ndarray, base: BasePlacement, topology: Topology, max_moves: int) -> StepPlan:
    """The best balanced candidate of `plan_step`, whatever the cost model says about the moves it needs."""
    problem = StepProblem(base=base, topology=topology, config=PlannerConfig(), load_MSE=load)
    plan = priced_step(problem, "replicas", *search_replicas(problem, max_moves=0))
    if max_moves:
        moved = priced_step(problem, "moves and replicas", *search_replicas(problem, max_moves=max_moves))
        plan = min(plan, moved, key=lambda one: float(one.imbalance_M.mean()))
    plan.validate(load)
    return plan


def hybrid(scale: Scale) -> Iterator[Cell]:
    """Step slots and one dynamic slot shared by all layers; homes refined on the step, or contiguous (no bar)."""
    for slots, most_copies, tolerance in ((2, 0.1, 0.02), (1, 6.0, 0.03)):
        config = PlannerConfig(redundant_slots=slots, dynamic_slots=1, tolerance=tolerance, cost=ONLY_BALANCE)
        for skew in (Skew.MEDIUM, Skew.STRONG):
            for experts, ranks in scale.sizes:
                topology = machine(ranks)
                for homes_name in ("refined", "contiguous"):
                    values: list[float] = []
                    copies = 0
                    for _, load, _ in cases(scale, experts, ranks, skew):
                        base = BasePlacement.contiguous(experts=experts, ranks=ranks)
                        if homes_name == "refined":
                            base = refined(load, topology)
                        problem = StepProblem(base=base, topology=topology, config=config, load_MSE=load)
                        plan = priced_step(problem, "replicas", *search_replicas(problem, max_moves=0))
                        values += list(plan.imbalance_M)
                        copies += plan.copies
                    mean, _, most = spread(values)
                    name = f"K={slots}, {homes_name} homes, E{experts} EP{ranks} {skew}"
                    bars = (1.03 + 5e-5, 1.02 + 5e-5) if homes_name == "refined" else (None, None)
                    limit = most_copies if homes_name == "refined" else None
                    yield Cell("hybrid", f"{name}: max", most, *bars, note=f"mean {mean:.4f}")
                    yield Cell("hybrid", f"{name}: copies a layer and micro-step", copies / len(values), limit)
