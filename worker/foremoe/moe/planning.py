"""Plans made by all ranks together, once per step.

Loads are counted where the routing is, gathered, and planned layer by layer; layer l is planned by rank l mod R, so the
work is spread and a layer's history stays in one place. Each rank then gets what concerns it: the tokens it sends, the
tokens it receives, and, equal everywhere, which copies exist. Equality of the common part is checked by a digest every
step: two ranks that follow different plans would hang in the next exchange, far from the cause.

Several EP groups plan from their own loads, but homes must be the same in all of them, because groups share each
expert's master weights. So where homes may move they are chosen first, once for all groups, from the mean of their
loads; replicas and splits follow group by group.

Shapes: M micro-step, L layer, S source rank, R rank, E expert.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foremoe.errors import PlannerError, RoutingError
from foremoe.moe.record import MicroRecord
from foremoe.planner import BasePlacement, PlannerConfig, StepPlan, plan_step
from foremoe.topology import Topology
from foremoe.transfer import ControlPlane, Move

__all__ = ["CommonPlan", "LayerPlan", "PlanFunction", "StepPlanner", "equally_many"]

IntArray = npt.NDArray[np.int64]

PlanFunction = Callable[..., StepPlan]
"""`foremoe.planner.plan_step`, or a function of the same signature."""


@dataclass(frozen=True, kw_only=True)
class CommonPlan:
    """What all ranks know of one layer's plan."""

    layer: int
    base: BasePlacement
    """Homes in force during the step."""
    step_copies: tuple[tuple[int, int], ...]
    """(expert, rank) of every step replica that computes a token in some micro-step; sorted by rank, then expert."""
    dynamic_copies_M: tuple[tuple[tuple[int, int], ...], ...]
    """The same for dynamic replicas, per micro-step."""
    planned_MR: IntArray

    def step_moves(self) -> list[Move]:
        """Weight moves of the step replicas; slots are numbered per rank in order of the expert."""
        return self._moves(self.step_copies)

    def dynamic_moves(self, micro_step: int) -> list[Move]:
        """Weight moves of one micro-step's dynamic replicas."""
        return self._moves(self.dynamic_copies_M[micro_step])

    def _moves(self, copies: Sequence[tuple[int, int]]) -> list[Move]:
        used: dict[int, int] = {}
        moves = []
        for expert, rank in copies:
            slot = used.get(rank, 0)
            used[rank] = slot + 1
            source = int(self.base.home_E[expert])
            moves.append(Move(layer=self.layer, expert=expert, source=source, target=rank, slot=slot))
        return moves


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One rank's view of one layer's plan for all micro-steps of a step."""

    common: CommonPlan
    from_me_MER: IntArray
    """Tokens of this rank per expert and computing rank."""
    to_me_MSE: IntArray
    """Tokens every source sends here per expert."""


class StepPlanner:
    """Collective planning; keeps the previous plan of the layers this rank plans."""

    def __init__(
        self,
        control: ControlPlane,
        *,
        twins: ControlPlane | None = None,
        topology: Topology,
        config: PlannerConfig,
        plan: PlanFunction = plan_step,
    ) -> None:
        """`twins`: this rank's peers in the other EP groups, if experts are sharded over several."""
        self._plan_step = plan
        self._control = control
        self._twins = twins
        self._topology = topology
        self.config = config
        self._own_config = config if twins is None else config.model_copy(update={"max_moves": 0})
        self._previous: dict[int, StepPlan] = {}
        self._previous_common: dict[int, StepPlan] = {}

    def plan(self, load_MLE: IntArray, bases: Sequence[BasePlacement]) -> tuple[list[LayerPlan], float]:
        """Plans of all layers for this rank, and the seconds this rank spent planning.

        `load_MLE`: recorded pairs of this rank. Collective. Raises PlannerError on every rank if one cannot plan, or
        if the ranks' plans differ.
        """
        load_SMLE = self._control.gather(load_MLE.astype(np.int32), what="gathering expert loads")
        started = time.perf_counter()
        mine = range(self._control.rank, len(bases), self._control.size)
        base_of = self._common_bases({layer: load_SMLE[:, :, layer] for layer in mine}, bases)
        planned = self._control.agree(
            lambda: {layer: self._plan_layer(layer, load_SMLE[:, :, layer], base_of[layer]) for layer in mine},
            what="planning the step",
        )
        parts = [
            {layer: _view(common, tokens_MSER, rank) for layer, (common, tokens_MSER) in planned.items()}
            for rank in range(self._control.size)
        ]
        seconds = time.perf_counter() - started
        received = self._control.exchange_objects(parts, what="distributing plans")
        views = {layer: view for part in received for layer, view in part.items()}
        plans = [views[layer] for layer in range(len(bases))]
        self._check_equal(plans)
        return plans, seconds

    def _common_bases(self, load_of: dict[int, IntArray], bases: Sequence[BasePlacement]) -> dict[int, BasePlacement]:
        """Homes of the layers this rank plans, the same in all EP groups; collective over the twins.

        The twins plan the same layers of their groups, and share the work of choosing homes for them.
        """
        twins = self._twins
        if twins is None or self.config.max_moves == 0:
            return {layer: bases[layer] for layer in load_of}
        loads = twins.gather_objects(load_of, what="gathering loads of all groups")

        def choose() -> dict[int, BasePlacement]:
            chosen = {}
            for layer in list(load_of)[twins.rank :: twins.size]:
                load_SME = _mean_load([load[layer] for load in loads])
                step = self._planned(layer, load_SME, bases[layer], self.config, self._previous_common)
                chosen[layer] = step.base
            return chosen

        chosen = self._control.agree(
            lambda: twins.agree(choose, what="choosing homes for all groups"), what="choosing homes"
        )
        parts = twins.gather_objects(chosen, what="choosing homes for all groups")
        return {layer: base for part in parts for layer, base in part.items()}

    def _plan_layer(self, layer: int, load_SME: IntArray, base: BasePlacement) -> tuple[CommonPlan, IntArray]:
        step = self._planned(layer, load_SME, base, self._own_config, self._previous)
        if self._twins is not None and step.base != base:
            raise PlannerError("the plan moves homes although maxMoves is 0", layer=layer)
        tokens_MSER = np.stack([plan.tokens_SER() for plan in step.plans])
        return _common(layer, step, tokens_MSER), tokens_MSER

    def _planned(
        self,
        layer: int,
        load_SME: IntArray,
        base: BasePlacement,
        config: PlannerConfig,
        history: dict[int, StepPlan],
    ) -> StepPlan:
        previous = history.get(layer)
        try:
            step = self._plan_step(
                load_SME.transpose(1, 0, 2).astype(np.int64),
                base=base,
                topology=self._topology,
                config=config,
                previous=previous if previous is not None and previous.base == base else None,
            )
        except PlannerError as error:
            raise PlannerError(error.message, layer=layer, expert=error.expert, rank=error.rank) from error
        history[layer] = step
        return step

    def _check_equal(self, plans: Sequence[LayerPlan]) -> None:
        digest = hashlib.blake2b(digest_size=16)
        for plan in plans:
            common = plan.common
            digest.update(repr((common.layer, common.step_copies, common.dynamic_copies_M)).encode())
            digest.update(common.base.home_E.tobytes())
            digest.update(common.planned_MR.tobytes())
        digests = self._control.gather_objects(digest.hexdigest(), what="comparing plans")
        for rank, value in enumerate(digests):
            if value != digests[0]:
                raise PlannerError("its plan of this step differs from rank 0's", rank=rank)


def equally_many(records: list[MicroRecord], control: ControlPlane) -> list[MicroRecord]:
    """The micro-steps of a step; raises RoutingError, on all ranks, if they have different numbers of them."""
    counts = control.gather(np.array([len(records)]), what="comparing micro-steps")[:, 0]
    if (counts != counts[0]).any():
        rank = int(np.flatnonzero(counts != counts[0])[0])
        raise RoutingError(
            f"{counts[rank]} micro-steps here, {counts[0]} on rank 0: give every rank as many, with records of "
            "zero rows where it has no tokens",
            rank=rank,
        )
    return records


def _mean_load(loads: Sequence[IntArray]) -> IntArray:
    """[S, M, E] of an average group; a group with fewer micro-steps counts as empty in the others."""
    most = max(load.shape[1] for load in loads)
    total = np.zeros((loads[0].shape[0], most, loads[0].shape[2]), dtype=np.int64)
    for load in loads:
        total[:, : load.shape[1]] += load
    return np.rint(total / len(loads)).astype(np.int64)


def _common(layer: int, step: StepPlan, tokens_MSER: IntArray) -> CommonPlan:
    used_MRE = tokens_MSER.sum(axis=1).transpose(0, 2, 1) > 0
    home_RE = np.zeros_like(step.hosts_RE)
    home_RE[step.base.home_E, np.arange(step.base.experts)] = True
    step_RE = step.hosts_RE & ~home_RE
    return CommonPlan(
        layer=layer,
        base=step.base,
        step_copies=_pairs(step_RE & used_MRE.any(axis=0)),
        dynamic_copies_M=tuple(_pairs(used_RE & ~step_RE & ~home_RE) for used_RE in used_MRE),
        planned_MR=tokens_MSER.sum(axis=(1, 2)),
    )


def _pairs(hosts_RE: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    return tuple((int(expert), int(rank)) for rank, expert in np.argwhere(hosts_RE))


def _view(common: CommonPlan, tokens_MSER: IntArray, rank: int) -> LayerPlan:
    return LayerPlan(
        common=common,
        from_me_MER=np.ascontiguousarray(tokens_MSER[:, rank]),
        to_me_MSE=np.ascontiguousarray(tokens_MSER[..., rank]),
    )
