"""Between the public runtime and the layers: answers every layer call, and runs a step's transfers.

`LayerCalls` owns what the MoE layers of one model share: dispatcher, workspace, replica slots, transfer engine. The
router hook asks it which experts to choose, the experts' forward asks it what to do with the rows; both answers depend
on the micro-step that is open (`step`). Without one, routing is live on the homes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from foremoe.errors import TransferError
from foremoe.moe.dispatch import AllToAllDispatcher, Dispatcher, make_split, map_pairs
from foremoe.moe.homes import Homes
from foremoe.moe.layer import LayerCall, NoReplicas, Replicas, RoutedExperts
from foremoe.moe.replicas import DynamicSlots, HomeGradients, LayerReplicas, StepSlots
from foremoe.moe.step import Kind, MicroStep, Step, Tokens, live_tokens
from foremoe.moe.workspace import Workspace
from foremoe.topology import Topology
from foremoe.transfer import ControlPlane, Move, PathName, TransferEngine, TransferTimes

__all__ = ["LayerCalls"]


class LayerCalls:
    """Everything the MoE layers of one distributed model share."""

    def __init__(
        self,
        layers: Sequence[RoutedExperts],
        homes: Homes,
        *,
        group: dist.ProcessGroup,
        control: ControlPlane,
        topology: Topology,
        path: PathName | None,
        timeout: timedelta | None,
    ) -> None:
        self._layers = layers
        self._homes = homes
        self._group = group
        self._control = control
        self._topology = topology
        self._path = path
        self._timeout = timeout
        self._experts = layers[0].num_experts
        self.dispatcher: Dispatcher = AllToAllDispatcher(group, control)
        self._workspace = Workspace()
        self._step_slots = [StepSlots() for _ in layers]
        self._transfers: TransferEngine | None = None
        self._dynamic: DynamicSlots | None = None
        self._home_gradients: HomeGradients | None = None
        self.micro: MicroStep | None = None

    # -- what the hooks ask ----------------------------------------------------------------------------------------

    def choose(self, layer: int, live_TK: torch.Tensor) -> torch.Tensor:
        """Expert ids the router of `layer` is to use instead of `live_TK`."""
        if self.micro is None or self.micro.step.fell_back:
            return live_TK
        return self.micro.choose(layer, live_TK)

    def prepare(self, layer: int, hidden_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> LayerCall:
        """Split and index maps of one call; collective where routing is live."""
        self._homes.refresh_before(layer)
        micro = self.micro
        if micro is None:
            return self._call(layer, ids_TK, self._live(layer, ids_TK), NoReplicas(), [])
        counters, key = micro.step.counters, (micro.index, layer)
        bad = ~torch.isfinite(weights_TK.detach()).all()
        counters.nonfinite[layer] = counters.nonfinite[layer] | bad if layer in counters.nonfinite else bad
        if micro.step.fell_back:
            tokens = self._live(layer, ids_TK)
            counters.rows[key] = counters.live[key] = int(tokens.to_me_SE.sum())
            return self._call(layer, ids_TK, tokens, NoReplicas(), [])
        ids_TK, recorded_TK = micro.dispatched(layer, ids_TK)
        counters.source[key] = _count(torch.where(recorded_TK, ids_TK, -1), self._experts)
        tokens, counters.live[key] = self._tokens(micro, layer, ids_TK, recorded_TK)
        counters.rows[key] = int(tokens.to_me_SE.sum())
        replicas, copies = self._replicas(micro, layer)
        return self._call(layer, ids_TK, tokens, replicas, copies)

    def _tokens(
        self, micro: MicroStep, layer: int, ids_TK: torch.Tensor, recorded_TK: torch.Tensor
    ) -> tuple[Tokens, int]:
        """Split of one call, and how many of the rows computed here have no record."""
        if micro.kind is Kind.PLANNED:
            return micro.planned_tokens(layer), 0
        step = micro.step
        live = self._live(layer, torch.where(recorded_TK, -1, ids_TK), forecast=step if step.forecast else None)
        rows = int(live.to_me_SE.sum())
        if step.forecast:
            return live, rows
        if micro.kind is Kind.COUNTED:
            recorded = self._live(layer, torch.where(recorded_TK, ids_TK, -1))
        else:
            recorded = micro.planned_tokens(layer)
        return recorded.plus(live), rows

    def _live(self, layer: int, ids_TK: torch.Tensor, *, forecast: Step | None = None) -> Tokens:
        home_E = self._homes.bases[layer].home_E
        hosts_RE = None
        if forecast is not None:
            hosts_RE = np.zeros((self._control.size, self._experts), dtype=np.bool_)
            hosts_RE[home_E, np.arange(self._experts)] = True
            for expert, rank in forecast.plans[layer].common.step_copies:
                hosts_RE[rank, expert] = True
        return live_tokens(ids_TK, home_E, self._control, hosts_RE=hosts_RE, topology=self._topology)

    def _replicas(self, micro: MicroStep, layer: int) -> tuple[Replicas, list[int]]:
        """Replicas of one call, and their experts on this rank in row order."""
        step, me = micro.step, self._control.rank
        if self._home_gradients is None or (micro.kind is Kind.COUNTED and not step.forecast):
            return NoReplicas(), []
        common = step.plans[layer].common
        stepped = [expert for expert, rank in common.step_copies if rank == me]
        dynamic = [expert for expert, rank in common.dynamic_copies_M[micro.index] if rank == me and not step.forecast]
        replicas = LayerReplicas(
            common=common,
            micro_step=micro.index,
            step=self._step_slots[layer],
            step_used=len(stepped),
            dynamic=None if step.forecast else self._dynamic,
            dynamic_used=len(dynamic),
            home=self._home_gradients,
            guess_next=micro.guess_next,
            backward_ran=step.backward_layers.add,
        )
        return replicas, stepped + dynamic

    def _call(
        self, layer: int, ids_TK: torch.Tensor, tokens: Tokens, replicas: Replicas, copies: Sequence[int]
    ) -> LayerCall:
        home = self._homes.order(layer, self._control.rank)
        group_of_E = np.full(self._experts, -1, dtype=np.int64)
        held = [*home, *copies]
        group_of_E[held] = np.arange(len(held))
        split = make_split(tokens.from_me_ER, tokens.to_me_SE, group_of_E, groups=len(held))
        return LayerCall(
            layer=layer,
            split=split,
            pairs=map_pairs(ids_TK, split, experts=self._experts),
            replicas=replicas,
            home_groups=len(home),
            gathered=self._layers[layer].gathered,
            activation=self._layers[layer].act_fn,
            dispatcher=self.dispatcher,
            workspace=self._workspace,
        )

    # -- transfers of a step ---------------------------------------------------------------------------------------

    def open_step(self, step: Step) -> None:
        """Push step replicas, in the order in which layers need them, and make room for dynamic ones."""
        common = [plan.common for plan in step.plans]
        step_moves = [plan.step_moves() for plan in common]
        dynamic_moves = [plan.dynamic_moves(m) for plan in common for m in range(len(step.records))]
        if not any(step_moves) and not any(dynamic_moves) and self._transfers is None:
            return
        engine = self.engine()
        me, home = self._control.rank, self._homes.packed(0)
        for layer, moves in enumerate(step_moves):
            self._step_slots[layer].open_step(self._homes.packed(layer), sum(move.target == me for move in moves))
        if any(dynamic_moves):
            if self._dynamic is None:
                self._dynamic = DynamicSlots(engine, rank=me, read_home=self._homes.weights)
            most = max(sum(move.target == me for move in moves) for moves in dynamic_moves)
            self._dynamic.open_step(home, most)
        every = [move for moves in (*step_moves, *dynamic_moves) for move in moves]
        engine.open_step(every, self._homes.expert_bytes, read=self._read).wait()
        for layer, moves in enumerate(step_moves):
            if moves:
                slots = self._step_slots[layer]
                slots.arriving(engine.fetch(moves, read=self._read, into=slots.weights_of))

    def reserve(self, step: Step) -> None:
        """Size the row buffers for the largest layer call of the plans."""
        rows = max(
            (max(int(plan.to_me_MSE[m].sum()), int(plan.from_me_MER[m].sum())) for plan in step.plans
             for m in range(len(step.records))),
            default=0,
        )  # fmt: skip
        # One more: the row of zeros behind the rows that come back.
        self._workspace.open_step(rows + 1)

    def prefetch_first(self, micro: MicroStep) -> None:
        """Start on the dynamic replicas of a micro-step's first layer that has some."""
        upcoming = micro.guess_next(-1, False)
        if self._dynamic is not None and upcoming is not None and not micro.step.fell_back and not micro.step.forecast:
            self._dynamic.prefetch(*upcoming)

    def return_gradients(self, step: Step) -> None:
        """Add what replicas accumulated to their home experts' gradients; zeros where an expert saw no token."""
        self._workspace.close_step()
        self._settle()
        if step.backward_layers or any(p.grad is not None for layer in self._layers for p in layer.parameters()):
            self._homes.fill_missing_gradients()
        if self._home_gradients is None:
            return
        for (layer, expert), sums in self._home_gradients.take().items():
            self._homes.add_gradients(layer, expert, sums)
        for plan in step.plans:
            moves = plan.common.step_moves()
            if not moves or plan.common.layer not in step.backward_layers:
                continue
            slots = self._step_slots[plan.common.layer]
            self._home_gradients.receive(moves, read=slots.gradients_of).wait()
            for (layer, expert), sums in self._home_gradients.take().items():
                self._homes.add_gradients(layer, expert, sums)

    def abandon(self, step: Step) -> None:
        """Wait for transfers under way and forget what replicas accumulated; see `ExpertParallelRuntime`."""
        self.micro = None
        self._workspace.close_step()
        place = f"{len(step.counters.rows)} layer calls and {self._submitted} transfers"
        places = self._control.meet(place, what="abandoning a step")
        for rank, other in enumerate(places):
            if other != places[0]:
                raise TransferError(
                    f"it left the step after {other}, rank 0 after {places[0]}: start all processes again", rank=rank
                )
        self._settle()
        if self._home_gradients is not None:
            self._home_gradients.take()
        self._homes.forget_gradients()

    def _settle(self) -> None:
        for layer, slots in enumerate(self._step_slots):
            slots.wait(layer)
        if self._dynamic is not None:
            self._dynamic.settle()

    @property
    def _submitted(self) -> int:
        return 0 if self._transfers is None else self._transfers.submitted

    def engine(self) -> TransferEngine:
        """The transfer engine; made, collectively, when the first expert has to move."""
        if self._transfers is None:
            node_R = self._topology.node_R
            self._transfers = TransferEngine(
                group=self._group,
                control=self._control,
                device=self._homes.packed(0)[0].device,
                expert_bytes=self._homes.expert_bytes,
                same_node_RR=node_R[:, None] == node_R[None, :],
                path=self._path,
                timeout=self._timeout,
            )
            self._home_gradients = HomeGradients(self._transfers, shapes=self._homes.weights)
        return self._transfers

    def take_times(self) -> TransferTimes:
        """Transfer times and volumes since the last call."""
        return TransferTimes() if self._transfers is None else self._transfers.reset_times()

    @property
    def replica_bytes(self) -> int:
        """Memory held for replicas and their gradients."""
        held = sum(slots.nbytes for slots in self._step_slots)
        held += 0 if self._dynamic is None else self._dynamic.nbytes
        return held + (0 if self._home_gradients is None else self._home_gradients.nbytes)

    def close(self) -> None:
        """End the transfer thread."""
        if self._transfers is not None:
            self._transfers.close()

    def _read(self, move: Move) -> list[torch.Tensor]:
        return self._homes.weights(move.layer, move.expert)


def _count(ids_TK: torch.Tensor, experts: int) -> torch.Tensor:
    """Pairs per expert [E]; ids < 0 count nothing. Unlike bincount it never reads the device."""
    flat = ids_TK.reshape(-1).clamp(min=-1) + 1
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[1:]
