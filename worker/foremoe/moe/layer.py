"""One call of an expert-parallel MoE layer: dispatch, experts, combine, and the same way back.

Forward and backward are one autograd function, because backward must follow the plan of its forward and because
weight gradients of replicas go to buffers that autograd does not know. Gradients of home experts are returned to
autograd as usual, so hooks and accumulation work as for any parameter; where parameters are shares of them (`shards`),
they add up in buffers as well. A rank without tokens still takes part: it returns an empty tensor that hangs on the
graph, or its peers would wait for it in backward.

Which weights lie in which row group, and where replica gradients go, is behind `Replicas`; which exchange is used
behind `Dispatcher`. Nothing in here reads a device value on the host.

Shapes: T token, K top-k, H hidden, P pairs sent, N rows computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from foremoe.moe.dispatch import Dispatcher, PairMap, Split
from foremoe.moe.experts import Bank, BankGradient, backward_experts, forward_experts
from foremoe.moe.shards import ExpertShards, GatheredExperts
from foremoe.moe.workspace import Workspace

__all__ = ["LayerCall", "NoReplicas", "Replicas", "RoutedExperts"]


class Replicas(Protocol):
    """Replica weights of one layer on this rank, and where their gradients accumulate."""

    def banks(self, counts: Sequence[int]) -> list[Bank]:
        """Banks behind the home bank; `counts` are the rows of their groups. Called in forward and in backward."""
        ...

    def gradients(self) -> list[BankGradient]:
        """One per bank; called in backward, after `banks`."""
        ...

    def finished_forward(self) -> None:
        """The layer's forward is queued; replica weights of the next layer may be fetched."""
        ...

    def finished_backward(self) -> None:
        """The layer's backward is queued; gradients of dynamic replicas may leave."""
        ...


class NoReplicas:
    """A layer whose experts are computed at home only."""

    def banks(self, counts: Sequence[int]) -> list[Bank]:
        """No banks."""
        return []

    def gradients(self) -> list[BankGradient]:
        """No gradients."""
        return []

    def finished_forward(self) -> None:
        """Nothing to do."""

    def finished_backward(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """Everything one call needs besides its tensors."""

    layer: int
    split: Split
    pairs: PairMap
    replicas: Replicas
    home_groups: int
    gathered: GatheredExperts | None
    """Weights and gradient sums of the home experts, where the parameters are shares of them."""
    activation: nn.Module
    dispatcher: Dispatcher
    workspace: Workspace

    def home_weights(self, gate_up: torch.Tensor, down: torch.Tensor) -> list[torch.Tensor]:
        """What to compute with, given the parameters."""
        return [gate_up, down] if self.gathered is None else self.gathered.weights

    def all_banks(self, gate_up: torch.Tensor, down: torch.Tensor) -> list[Bank]:
        """Home bank and replica banks with their row counts."""
        counts = self.split.group_counts
        home = Bank(gate_up=gate_up, down=down, counts=counts[: self.home_groups])
        return [home, *self.replicas.banks(counts[self.home_groups :])]

    def to_experts(self, rows_PH: torch.Tensor, out_NH: torch.Tensor) -> torch.Tensor:
        """Send pair rows to the ranks that compute them; `out_NH` gets them sorted by group."""
        split = self.split
        received = self.workspace.take("b", split.received, rows_PH.shape[1], rows_PH)
        received = self.dispatcher.exchange(
            rows_PH, received, send=split.send_sizes, receive=split.receive_sizes, layer=self.layer
        )
        return torch.index_select(received, 0, self.pairs.regroup_N, out=out_NH)

    def to_tokens(self, rows_NH: torch.Tensor, returned: torch.Tensor) -> torch.Tensor:
        """Send expert rows back to `returned` [P + 1, H], in the order they were sent, the last row zero."""
        split, width = self.split, rows_NH.shape[1]
        ungrouped = self.workspace.take("b", split.received, width, rows_NH)
        torch.index_select(rows_NH, 0, self.pairs.ungroup_N, out=ungrouped)
        got = self.dispatcher.exchange(
            ungrouped, returned[:-1], send=split.receive_sizes, receive=split.send_sizes, layer=self.layer
        )
        if got is ungrouped:
            returned[:-1].copy_(got)
        returned[-1].zero_()
        return returned


class _RoutedExpertsFunction(torch.autograd.Function):
    """(hidden [T, H], weights [T, K], home weights) -> [T, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        call: LayerCall,
    ) -> torch.Tensor:
        """Dispatch, compute, combine."""
        width, split, workspace = hidden_TH.shape[1], call.split, call.workspace
        sent = workspace.take("a", split.sent, width, hidden_TH)
        torch.index_select(hidden_TH, 0, call.pairs.token_P, out=sent)
        rows_NH = call.to_experts(sent, workspace.keep(split.received, width, hidden_TH))
        gate_up, down = call.home_weights(gate_up, down)
        out_NH = workspace.take("a", split.received, width, hidden_TH)
        banks = call.all_banks(gate_up, down)
        pre_N2I = forward_experts(rows_NH, banks, call.activation, out_NH=out_NH, workspace=workspace)
        call.replicas.finished_forward()
        returned = call.to_tokens(out_NH, workspace.keep(split.sent + 1, width, hidden_TH))
        ctx.call = call
        ctx.save_for_backward(rows_NH, pre_N2I, returned, weights_TK, gate_up, down)
        return _combine(returned, call.pairs.row_TK, weights_TK).to(hidden_TH.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The same rows the same way; home gradients are returned, replica gradients accumulate in their buffers."""
        call: LayerCall = ctx.call
        rows_NH, pre_N2I, returned, weights_TK, gate_up, down = ctx.saved_tensors
        grad_TH = grad_TH.to(rows_NH.dtype)
        width, pairs, workspace = grad_TH.shape[1], call.pairs, call.workspace
        grad_weights_TK = _weights_gradient(grad_TH, returned, pairs.row_TK, weights_TK)
        sent = workspace.take("a", call.split.sent, width, rows_NH)
        torch.index_select(grad_TH, 0, pairs.token_P, out=sent)
        sent.mul_(weights_TK.reshape(-1)[pairs.pair_P].unsqueeze(-1))
        grad_NH = call.to_experts(sent, workspace.take("c", call.split.received, width, rows_NH))
        banks = call.all_banks(gate_up, down)
        if call.gathered is not None and ctx.needs_input_grad[2]:
            home = call.gathered.open_gradients()
        else:
            home = BankGradient(gate_up=torch.empty_like(gate_up), down=torch.empty_like(down), accumulate=False)
        grad_rows_NH = workspace.take("a", call.split.received, width, rows_NH)
        targets = [home, *call.replicas.gradients()]
        backward_experts(
            grad_NH, rows_NH, pre_N2I, banks, targets, call.activation, out_NH=grad_rows_NH, workspace=workspace
        )
        call.replicas.finished_backward()
        returned_grad = call.to_tokens(grad_rows_NH, workspace.take("c", call.split.sent + 1, width, rows_NH))
        grad_hidden_TH = _combine(returned_grad, pairs.row_TK, None)
        if call.gathered is not None:
            return grad_hidden_TH, grad_weights_TK, None, None, None
        return grad_hidden_TH, grad_weights_TK, home.gate_up, home.down, None


def _combine(rows: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """Sum every token's rows in top-k order, at least in fp32: [T, H] in the rows' dtype."""
    wide = _accumulator(rows.dtype)
    total = rows.new_zeros((row_TK.shape[0], rows.shape[1]), dtype=wide)
    for choice in range(row_TK.shape[1]):
        part = rows.index_select(0, row_TK[:, choice]).to(wide)
        total.add_(part if weights_TK is None else part.mul_(weights_TK[:, choice, None].to(wide)))
    return total.to(rows.dtype)


def _weights_gradient(
    grad_TH: torch.Tensor, rows: torch.Tensor, row_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    wide = _accumulator(rows.dtype)
    gradient = torch.empty(weights_TK.shape, dtype=wide, device=rows.device)
    wide_grad_TH = grad_TH.to(wide)
    for choice in range(row_TK.shape[1]):
        part = rows.index_select(0, row_TK[:, choice]).to(wide)
        torch.sum(part.mul_(wide_grad_TH), dim=-1, out=gradient[:, choice])
    return gradient.to(weights_TK.dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


PrepareCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], LayerCall]
"""(hidden [T, H], ids [T, K], weights [T, K]) -> what to do with them; collective when routing is live."""


class RoutedExperts(nn.Module):
    """Takes the place of a model's packed experts and holds this rank's home experts under the same names."""

    NAMES = ("gate_up_proj", "down_proj")

    def __init__(
        self,
        original: nn.Module,
        *,
        home: Sequence[int],
        prepare: PrepareCall,
        shards: ExpertShards | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """Keep the experts `home` of `original`, in this order. `prepare` plans every call.

        With `shards` the parameters are this rank's share of them; what is computed with is gathered in
        `compute_dtype` (default: the parameters').
        """
        super().__init__()
        self.rows = [int(original.get_parameter(name).shape[1]) for name in self.NAMES]
        for name in self.NAMES:
            packed = original.get_parameter(name)
            kept = packed.detach()[list(home)].clone()
            kept = kept if shards is None else shards.own(kept)
            self.register_parameter(name, nn.Parameter(kept, requires_grad=packed.requires_grad))
        self.gathered: GatheredExperts | None = None
        if shards is not None:
            dtype = compute_dtype or self.get_parameter(self.NAMES[0]).dtype
            self.gathered = GatheredExperts(self.own_parameters, rows=self.rows, dtype=dtype)
        self.num_experts = int(original.get_parameter("gate_up_proj").shape[0])
        self.config = getattr(original, "config", None)
        self.act_fn = original.get_submodule("act_fn")
        self._prepare = prepare

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Output [T, H] of the routed experts for `hidden_states` [T, H]."""
        call = self._prepare(hidden_states, top_k_index, top_k_weights)
        compute_dtype = hidden_states.dtype
        device_type = hidden_states.device.type
        if torch.is_autocast_enabled(device_type):
            compute_dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            out: torch.Tensor = _RoutedExpertsFunction.apply(  # type: ignore[no-untyped-call]
                hidden_states.to(compute_dtype), top_k_weights, self.gate_up_proj, self.down_proj, call
            )
        return out.to(hidden_states.dtype)

    def own_parameters(self) -> list[nn.Parameter]:
        """[gate_up, down]: the home experts, or this rank's share of them."""
        return [self.get_parameter(name) for name in self.NAMES]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RoutedExperts:
        """Whatever moves or converts the parameters makes what was gathered from them worthless."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.gathered is not None:
            self.gathered.release()
        return self

    def extra_repr(self) -> str:
        """How many experts are here, of how many."""
        return f"home experts {self.get_parameter('gate_up_proj').shape[0]} of {self.num_experts}"
