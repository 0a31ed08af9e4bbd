"""Replay a trace under several strategies.

One layer of one pass is in memory at a time; what is kept are the figures and, for strategies that look back, the
hosts and load sums of every layer's last step. Balance, copies and traffic are exact; times come from the cost
model and are called modelled everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foremoe.errors import ForeMoEError, TraceError
from foremoe.planner import BasePlacement, PlannerConfig, StepPlan, Strategy, plan_step
from foremoe.planner.cost import CostModel, LayerLoad, LayerSeconds
from foremoe.planner.plan import Plan
from foremoe.planner.problem import layer_load
from foremoe.routing import PassInfo, TraceReader
from foremoe.simulate.sources import recut
from foremoe.topology import Topology

Floats = npt.NDArray[np.float64]

CAUSES = ("expert", "dense", "exchange", "exposed_copy")
"""Parts of a modelled step's time, in the order reports show them."""


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """Figures of one strategy over a trace."""

    strategy: str
    imbalance_ML: Floats
    """Max over mean of every micro-step (passes in a row) and layer."""
    seconds: dict[str, float]
    """Modelled seconds by cause, all passes and layers; `copy` holds hidden and exposed transfers."""
    copies: int
    """Replicas brought within micro-steps."""
    step_replicas: int
    """Replicas pushed at step boundaries."""
    moves: int
    """Experts that changed home."""
    cross_domain_pairs: int
    cross_node_pairs: int
    pairs: int

    @property
    def total_seconds(self) -> float:
        """Modelled seconds of all passes."""
        return sum(self.seconds[cause] for cause in CAUSES)

    def summary(self) -> dict[str, float | int | str]:
        """One row of the table, as plain numbers."""
        return {
            "strategy": self.strategy,
            "imbalance_mean": float(self.imbalance_ML.mean()),
            "imbalance_p95": float(np.quantile(self.imbalance_ML, 0.95)),
            "imbalance_max": float(self.imbalance_ML.max()),
            "copies_per_micro_step_and_layer": self.copies / self.imbalance_ML.size,
            "step_replicas": self.step_replicas,
            "moves": self.moves,
            "cross_node_share": self.cross_node_pairs / max(1, self.pairs),
            "cross_domain_share": self.cross_domain_pairs / max(1, self.pairs),
            "modelled_seconds": self.total_seconds,
            **{f"modelled_{cause}_seconds": self.seconds[cause] for cause in (*CAUSES, "copy")},
        }


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A trace replayed under several strategies."""

    trace: str
    model: str
    passes: tuple[PassInfo, ...]
    micro_steps: tuple[int, ...]
    """Of every pass."""
    layers: int
    source_ranks: int
    """Of the trace; other than the topology's ranks means that sources were merged or shared out."""
    topology: Topology
    config: PlannerConfig
    ideal_seconds: float
    """Modelled time with every rank at the mean and no transfers: forced balance."""
    results: tuple[StrategyResult, ...]


class _Totals:
    """Figures of one strategy while they are added up."""

    def __init__(self) -> None:
        self.imbalance: list[list[float]] = []
        self.seconds = dict.fromkeys((*CAUSES, "copy"), 0.0)
        self.copies = self.step_replicas = self.moves = self.cross_domain = self.cross_node = self.pairs = 0

    def add(self, plan: StepPlan, cost: CostModel, topology: Topology, top_k: int) -> list[float]:
        between = plan.modelled_seconds
        for micro in plan.plans:
            seconds = cost.layer(layer_load(micro, topology, top_k))
            for cause in self.seconds:
                self.seconds[cause] += getattr(seconds, cause)
            between -= seconds.total
            self._count(micro, topology)
        # Pushes of step replicas and moves of homes stand between steps, nothing hides them in the model.
        between = max(0.0, between)
        self.seconds["exposed_copy"] += between
        self.seconds["copy"] += between
        self.step_replicas += len(plan.replicas)
        self.moves += int(plan.moves.size)
        return [micro.imbalance for micro in plan.plans]

    def _count(self, plan: Plan, topology: Topology) -> None:
        self.copies += len(plan.copies)
        self.cross_domain += plan.crossing(topology.domain_R)
        self.cross_node += plan.crossing(topology.node_R)
        self.pairs += int(plan.rank_load_R.sum())


def simulate(
    reader: TraceReader,
    *,
    topology: Topology,
    config: PlannerConfig,
    strategies: Sequence[Strategy],
    passes: Sequence[PassInfo] | None = None,
    layers: int | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Simulation:
    """Replay `passes` (default: all) of a trace; `progress` is called after every (strategy, layer, pass).

    Strategies other than `static` get the same slots; `config.max_moves` holds for all. Raises TraceError for an
    empty trace or source ranks that do not map onto the topology, PlannerError for loads no plan can be made of.
    """
    chosen = tuple(reader.passes() if passes is None else passes)
    if not chosen:
        raise TraceError(f"{reader.path} holds no complete pass yet")
    count = reader.meta.layers if layers is None else min(layers, reader.meta.layers)
    shape = config.cost.model.model_copy(update={"top_k": reader.meta.top_k})
    config = config.model_copy(update={"cost": config.cost.model_copy(update={"model": shape})})
    cost = CostModel(config.cost, topology)
    base = BasePlacement.contiguous(experts=reader.meta.experts, ranks=topology.size)
    totals = {strategy: _Totals() for strategy in strategies}
    ideal = 0.0
    columns: dict[Strategy, list[list[float]]] = {strategy: [] for strategy in strategies}
    for layer in range(count):
        homes = dict.fromkeys(strategies, base)
        last: dict[tuple[Strategy, str], StepPlan] = {}
        column: dict[Strategy, list[float]] = {strategy: [] for strategy in strategies}
        for info in chosen:
            load_MSE = recut(reader.load_layer(info, layer), topology.size)
            ideal += sum(_ideal(load_SE, cost, topology, reader.meta.top_k).total for load_SE in load_MSE)
            for strategy in strategies:
                settings = config.model_copy(update={"strategy": strategy})
                try:
                    plan = plan_step(
                        load_MSE,
                        base=homes[strategy],
                        topology=topology,
                        config=settings,
                        previous=last.get((strategy, info.name)),
                    )
                except ForeMoEError as error:
                    raise type(error)(
                        f"{info.path.name}: {error.message}", layer=layer, expert=error.expert, rank=error.rank
                    ) from error
                column[strategy] += totals[strategy].add(plan, cost, topology, reader.meta.top_k)
                homes[strategy] = plan.base
                last[strategy, info.name] = replace(plan, plans=())
                progress()
        for strategy in strategies:
            columns[strategy].append(column[strategy])
    return Simulation(
        trace=str(reader.path),
        model=reader.meta.model,
        passes=chosen,
        micro_steps=tuple(reader.micro_steps(info) for info in chosen),
        layers=count,
        source_ranks=reader.meta.source_ranks,
        topology=topology,
        config=config,
        ideal_seconds=ideal,
        results=tuple(_result(strategy, totals[strategy], columns[strategy]) for strategy in strategies),
    )


def _result(strategy: Strategy, totals: _Totals, columns: list[list[float]]) -> StrategyResult:
    return StrategyResult(
        strategy=str(strategy),
        imbalance_ML=np.array(columns).T,
        seconds=totals.seconds,
        copies=totals.copies,
        step_replicas=totals.step_replicas,
        moves=totals.moves,
        cross_domain_pairs=totals.cross_domain,
        cross_node_pairs=totals.cross_node,
        pairs=totals.pairs,
    )


def _ideal(load_SE: npt.NDArray[np.int64], cost: CostModel, topology: Topology, top_k: int) -> LayerSeconds:
    """Forced balance: every rank at the mean, an even share of pairs leaving each domain, nothing copied."""
    total = int(load_SE.sum())
    domain_size = np.bincount(topology.domain_R)
    leaving = (total * domain_size / topology.size * (1 - domain_size / topology.size)).max()
    return cost.layer(
        LayerLoad(
            max_rank_pairs=-(-total // topology.size),
            max_node_pairs=int(leaving),
            tokens_per_rank=total / topology.size / top_k,
        )
    )
