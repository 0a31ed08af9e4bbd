"""Expert parallelism for a Hugging Face MoE model whose routing is known before it runs.

`expert_parallel` keeps this rank's home experts, replaces the experts' forward and hooks the router. From then on the
model works as plain expert parallelism. Between `begin_step` and `end_step` it replays recorded routing and follows the
planner: replicas of busy experts are pushed to other ranks, tokens are split exactly, and what replicas learned is
home before `end_step` returns. docs/runtime.md is the contract.

Always: every call is collective over the group, and over the twins where experts are sharded over several groups.
Expert parameters stay ordinary leaf parameters; replicas never are. Losses are summed over ranks, never averaged.
Several converted models may live in one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from foremoe.errors import PlannerError, RoutingError
from foremoe.moe.calls import LayerCalls
from foremoe.moe.clipping import clip_gradients
from foremoe.moe.dispatch import Dispatcher
from foremoe.moe.homes import Homes
from foremoe.moe.layer import LayerCall
from foremoe.moe.planning import PlanFunction, StepPlanner, equally_many
from foremoe.moe.record import MicroRecord, check_records
from foremoe.moe.report import StepReport
from foremoe.moe.reporting import make_report, trustworthy
from foremoe.moe.setup import (
    agreed_topology,
    check_equal_moves,
    check_equal_settings,
    check_equal_twins,
    convert,
    inspect_model,
    with_model_shape,
)
from foremoe.moe.shards import ExpertShards
from foremoe.moe.state import FullState
from foremoe.moe.step import MicroStep, Step
from foremoe.planner import BasePlacement, PlannerConfig, plan_step
from foremoe.topology import Topology
from foremoe.transfer import ControlPlane, PathName

__all__ = ["ExpertParallelRuntime", "expert_parallel"]

T = TypeVar("T")

_log = logging.getLogger(__name__)


def expert_parallel(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    twins: dist.ProcessGroup | None = None,
    compute_dtype: torch.dtype | None = None,
    topology: Topology | None = None,
    config: PlannerConfig | None = None,
    base: BasePlacement | None = None,
    path: PathName | None = None,
    timeout: timedelta | None = None,
    plan: PlanFunction = plan_step,
) -> ExpertParallelRuntime:
    """Distribute the experts of `model` over `group`, in place; collective.

    `group`: the EP group (default: all ranks). `twins`: the ranks with this rank's place in the other EP groups, where
    there are several (the expert-data-parallel mesh): experts are then sharded over them too, their gradients summed
    over all groups, and every method is collective over all groups. `compute_dtype`: in what sharded experts are
    gathered to be computed with (default: the parameters'). `topology`: where the group's ranks sit (default: by the
    ranks' own host names). `config`: planner settings. `base`: homes of all layers (default: contiguous). `path`:
    force one transfer path, for measurements. `timeout`: bound of host-side waits (default: the group's).
    `plan`: plans one layer's step, for strategies of one's own; equal on all ranks.

    Raises PlannerError, on every rank, if the model has no MoE layer or an unknown layout, if the group does not
    divide the experts, or if ranks disagree about settings, model or homes.
    """
    process_group = dist.group.WORLD if group is None else group
    if process_group is None:
        raise PlannerError("torch.distributed is not initialised: call init_process_group first")
    return ExpertParallelRuntime(
        model,
        group=process_group,
        twins=twins,
        compute_dtype=compute_dtype,
        topology=topology,
        config=PlannerConfig() if config is None else config,
        base=base,
        path=path,
        timeout=timeout,
        plan=plan,
    )


class ExpertParallelRuntime:
    """What `expert_parallel` returns: the handle of one distributed model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        group: dist.ProcessGroup,
        twins: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
        topology: Topology | None,
        config: PlannerConfig,
        base: BasePlacement | None,
        path: PathName | None,
        timeout: timedelta | None,
        plan: PlanFunction,
    ) -> None:
        self.model = model
        self._control = control = ControlPlane(group, timeout=timeout)
        facts = control.agree(lambda: inspect_model(model), what="distributing the model")
        self.topology = agreed_topology(control, topology)
        self.config = with_model_shape(config, facts)
        first = base
        if first is None:
            first = control.agree(
                lambda: BasePlacement.contiguous(experts=facts.experts, ranks=control.size), what="placing experts"
            )
        check_equal_settings(control, config=self.config, topology=self.topology, base=first, facts=facts)
        self._facts = facts
        self._groups = [group]
        shards = None
        if twins is not None and dist.get_world_size(twins) > 1:
            self._groups.append(twins)
            shards = ExpertShards(twins, timeout=timeout)
            check_equal_twins(shards.control, group=control, base=first, facts=facts)
        self._twins = None if shards is None else shards.control
        self._layers, self._undo = convert(
            facts,
            home=first.home_E == control.rank,
            choose=self._choose,
            prepare=self._prepare,
            shards=shards,
            compute_dtype=compute_dtype,
        )
        self._homes = Homes([first] * len(self._layers), self._layers, control, shards)
        self._calls = LayerCalls(
            self._layers,
            self._homes,
            group=group,
            control=control,
            topology=self.topology,
            path=path,
            timeout=timeout,
        )
        self._planner = StepPlanner(control, twins=self._twins, topology=self.topology, config=self.config, plan=plan)
        self._state = FullState(model, self._layers, self._homes, groups=self._groups, control=control)
        self._step: Step | None = None
        self._distrust = False

    # -- the step --------------------------------------------------------------------------------------------------

    def begin_step(self, routing: Sequence[torch.Tensor], *, forecast: bool = False) -> None:
        """Plan one pass over micro-steps with constant weights, and push its step replicas.

        `routing`: one integer tensor [tokens, moe_layers, top_k] per micro-step of this rank, rows in the order in
        which the MoE layers see tokens; as many micro-steps on every rank (an empty one has zero rows). -1: no
        record, routed live. -2: needs no routed expert. Tensors with one row per decoder layer are taken too.
        `forecast`: the record only says where replicas pay; routing stays live and is split by live counts (a
        reference model, whose own choices must not be replaced).

        Raises RoutingError or PlannerError on every rank alike; then no step is open and the model routes live.
        """
        if self._step is not None:
            raise RoutingError(
                "a step is open: call end_step first, or abandon_step on every rank if an exception ended it early"
            )
        records = self._agree(
            lambda: equally_many(
                self._control.agree(lambda: self._checked(routing), what="checking the record"), self._control
            )
        )
        fell_back, self._distrust = self._distrust, False
        if fell_back:
            _log.error("routing of this step is live: the step before did not execute its plan")
        step = self._plan(records, forecast=forecast, fell_back=fell_back)
        self._homes.refresh()
        self._calls.open_step(step)
        self._calls.reserve(step)
        self._step = step

    @contextmanager
    def micro_step(self, index: int) -> Iterator[None]:
        """Forward, and backward if there is one, of micro-step `index` run inside. It may be visited again."""
        if self._step is None:
            raise RoutingError("micro_step needs begin_step first; without it the model routes live")
        if not 0 <= index < len(self._step.records):
            raise RoutingError(f"micro-step {index} of {len(self._step.records)}")
        if self._calls.micro is not None:
            raise RoutingError(f"micro-step {index} inside micro-step {self._calls.micro.index}")
        self._calls.micro = MicroStep(self._step, index, control=self._control)
        try:
            self._calls.prefetch_first(self._calls.micro)
            yield
        finally:
            self._calls.micro = None

    def end_step(self) -> StepReport:
        """Bring replica gradients home, compare what ran with the plan, and report; call it before the optimizer.

        After it every home expert's `.grad` is the sum over all ranks' losses and all copies (zeros where no token
        came), if there was a backward. Numbers are equal on all ranks.
        """
        step = self._step
        if step is None:
            raise RoutingError("end_step without begin_step")
        self._step = None
        self._calls.return_gradients(step)
        self._homes.collect_gradients()
        report = make_report(
            step,
            control=self._control,
            times=self._calls.take_times(),
            replica_bytes=self._calls.replica_bytes,
            experts=self._facts.experts,
            layers=len(self._layers),
        )
        self._distrust |= not trustworthy(report)
        return report

    def abandon_step(self) -> None:
        """Give up the open step after an exception; call it on every rank, then the next step may begin.

        What replicas learned in the step is dropped. Gradients that parameters got in it are incomplete: zero them.
        Raises TransferError, within the group's timeout, if a rank does not come here too or has left the step at
        another place than the others; such processes must be started again.
        """
        step = self._step
        if step is None:
            raise RoutingError("abandon_step without begin_step")
        self._step = None
        self._calls.abandon(step)
        if self._twins is not None:
            self._twins.meet("", what="abandoning a step")
        _log.warning("the open step was abandoned; gradients it left behind are incomplete")

    @property
    def replica_bytes(self) -> int:
        """Memory this rank holds for replicas and their gradients."""
        return self._calls.replica_bytes

    @property
    def dispatcher(self) -> Dispatcher:
        """What exchanges token rows; may be replaced between steps, on all ranks alike."""
        return self._calls.dispatcher

    @dispatcher.setter
    def dispatcher(self, dispatcher: Dispatcher) -> None:
        self._calls.dispatcher = dispatcher

    @property
    def bases(self) -> tuple[BasePlacement, ...]:
        """Homes in force, per MoE layer."""
        return tuple(self._homes.bases)

    # -- parameters and state --------------------------------------------------------------------------------------

    def expert_parameters(self) -> list[nn.Parameter]:
        """This rank's home experts, packed [E_local, ...]: sharded over the group, so never all-reduced over it.

        With twins they are this rank's share of the experts' rows, [E_local, rows / twins, ...] rounded up.
        """
        return [parameter for layer in self._layers for parameter in layer.own_parameters()]

    def dense_parameters(self) -> list[nn.Parameter]:
        """All other parameters; replicated, and the caller's (or FSDP's) to reduce."""
        experts = {id(parameter) for parameter in self.expert_parameters()}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in experts]

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model under the names and shapes of `model.state_dict()` before conversion, on every rank."""
        return dict(self._state.named_tensors())

    def named_full_tensors(self, *, device: torch.device | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """`full_state_dict` one tensor at a time, for weight streaming; collective at every item.

        `device`: where to gather, for parameters that an off-loading wrapper keeps on the host.
        """
        return self._state.named_tensors(device)

    def home_experts(self) -> dict[str, list[int]]:
        """Expert ids behind each packed expert parameter of this rank, by the parameter's name, in row order."""
        return self._state.home_experts()

    def whole_experts(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """The home experts of this rank, whole, from a tensor of the shape of its parameter `name`; collective."""
        return self._state.whole(name, own)

    def own_experts(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this rank keeps of its home experts, given whole in the order of `home_experts`."""
        return self._state.own(name, whole)

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `full_state_dict` gave, under this placement; every rank passes the whole state."""
        self._state.load(state)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the sum of all ranks' losses, full shapes, on every rank; changes no `.grad`.

        Dense gradients are summed over the ranks here. Where FSDP already reduced them (DTensors), they are gathered
        as they are: then they mean what FSDP made of them, by default the mean over its mesh.
        """
        self._homes.collect_gradients()
        return self._state.gradients()

    def collect_gradients(self) -> None:
        """Sum expert gradients over the twins after a backward outside of a step; `end_step` does so by itself."""
        self._homes.collect_gradients()

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; the norm before.

        Call it when dense gradients are reduced. Every element counts once; equal on all ranks.
        """
        return clip_gradients(self.dense_parameters(), self.expert_parameters(), max_norm=max_norm, groups=self._groups)

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        """Optimizer state by parameter name, experts gathered; independent of placement, EP size and strategy."""
        return self._state.optimizer_state(optimizer)

    def load_full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, torch.Tensor]]
    ) -> None:
        """Load what `full_optimizer_state` gave, under this placement."""
        self._state.load_optimizer_state(optimizer, state)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ownership moves carry this optimizer's state of expert parameters along."""
        self._homes.attach(optimizer)

    def move_homes(self, bases: BasePlacement | Sequence[BasePlacement]) -> int:
        """Change homes now, between steps: weights, gradients and attached optimizer state move, bit for bit.

        One placement for all layers, or one per layer. Returns how many experts moved. Collective.
        """
        if self._step is not None:
            raise RoutingError("homes change between steps: call end_step first")
        wanted = [bases] * len(self._layers) if isinstance(bases, BasePlacement) else list(bases)
        if self._twins is not None:
            check_equal_moves(self._twins, wanted)
        return self._homes.move_to(wanted, self._calls.engine())

    def close(self) -> None:
        """Undo the router hooks and end the transfer thread; the model keeps its home experts.

        Its three process groups stay: torch would give the names of destroyed ones, and dead addresses, to new ones.
        """
        for undo in self._undo:
            undo()
        self._calls.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _choose(self, layer: int, live_TK: torch.Tensor) -> torch.Tensor:
        return self._calls.choose(layer, live_TK)

    def _prepare(
        self, layer: int, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> LayerCall:
        return self._calls.prepare(layer, hidden_TH, ids_TK, weights_TK)

    def _checked(self, routing: Sequence[torch.Tensor]) -> list[MicroRecord]:
        facts = self._facts
        return check_records(
            routing,
            moe_layers=[site.decoder_layer for site in facts.sites],
            decoder_layers=facts.decoder_layers,
            top_k=facts.top_k,
            experts=facts.experts,
        )

    def _agree(self, action: Callable[[], T]) -> T:
        """What fails in one EP group fails in all, or the others would wait for its ranks."""
        return action() if self._twins is None else self._twins.agree(action, what="agreeing with other groups")

    def _plan(self, records: list[MicroRecord], *, forecast: bool, fell_back: bool) -> Step:
        shape = (len(records), len(self._layers), self._facts.experts)
        load_MLE = np.stack([record.load_LE for record in records]) if records else np.zeros(shape, dtype=np.int64)
        if fell_back:
            load_MLE = np.zeros(shape, dtype=np.int64)
        plans, seconds = self._agree(lambda: self._planner.plan(load_MLE, self._homes.bases))
        wanted = [plan.common.base for plan in plans]
        moved = 0
        if any(new != old for new, old in zip(wanted, self._homes.bases, strict=True)):
            moved = self._homes.move_to(wanted, self._calls.engine())
        return Step(
            records=records,
            plans=plans,
            plan_seconds=seconds,
            moved_homes=moved,
            forecast=forecast,
            fell_back=fell_back,
        )
