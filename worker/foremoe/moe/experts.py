"""The arithmetic of gated experts on rows that are already sorted by expert.

Rows come in groups, one per expert held here: home experts first, then replicas. Weights of the groups lie in up to
three *banks* (home parameters, step slots, dynamic slots) because home experts are parameters of the model and
replicas are not; a bank is one packed pair of tensors and takes a contiguous range of rows.

Group sizes are host integers known from the plan, so nothing here reads the device. On CUDA the products of one bank
are one grouped kernel of torch; elsewhere, and for fp64, a loop over the groups, which on a CPU is as fast. Backward is
written out rather than left to autograd: indexing packed weights in a loop would allocate a full zero gradient per
expert, and gradients of replicas must accumulate wider than the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from foremoe.moe.workspace import Workspace

__all__ = ["Bank", "BankGradient", "backward_experts", "forward_experts"]

_GROUPED_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Bank:
    """Weights of G experts: gate_up [G, 2I, H], down [G, H, I], and how many rows go to each."""

    gate_up: torch.Tensor
    down: torch.Tensor
    counts: Sequence[int]

    @property
    def rows(self) -> int:
        """Rows of all its groups."""
        return sum(self.counts)


@dataclass(frozen=True, kw_only=True)
class BankGradient:
    """Where the weight gradients of a bank go: tensors of its shapes, added to if `accumulate`."""

    gate_up: torch.Tensor
    down: torch.Tensor
    accumulate: bool


def forward_experts(
    rows_NH: torch.Tensor,
    banks: Sequence[Bank],
    activation: nn.Module,
    *,
    out_NH: torch.Tensor,
    workspace: Workspace,
) -> torch.Tensor:
    """Write every row's expert output to `out_NH`; return the pre-activations [N, 2I] that backward needs."""
    pre_N2I = workspace.keep(rows_NH.shape[0], 2 * banks[0].down.shape[2], rows_NH)
    for bank, rows in _ranges(banks):
        _rows_times_weights(rows_NH[rows], bank.gate_up, bank.counts, out=pre_N2I[rows], transpose=True)
    hidden_NI = _activate(pre_N2I, activation, workspace)
    for bank, rows in _ranges(banks):
        _rows_times_weights(hidden_NI[rows], bank.down, bank.counts, out=out_NH[rows], transpose=True)
    return pre_N2I


def backward_experts(
    grad_NH: torch.Tensor,
    rows_NH: torch.Tensor,
    pre_N2I: torch.Tensor,
    banks: Sequence[Bank],
    gradients: Sequence[BankGradient],
    activation: nn.Module,
    *,
    out_NH: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Gradient of the rows to `out_NH`, of the weights to `gradients` (one per bank)."""
    grad_hidden_NI = workspace.take("grad hidden", grad_NH.shape[0], pre_N2I.shape[1] // 2, grad_NH)
    for bank, rows in _ranges(banks):
        _rows_times_weights(grad_NH[rows], bank.down, bank.counts, out=grad_hidden_NI[rows], transpose=False)
    hidden_NI, grad_pre_N2I = _activate_backward(grad_hidden_NI, pre_N2I, activation, workspace)
    for (bank, rows), target in zip(_ranges(banks), gradients, strict=True):
        _weight_gradients(grad_NH[rows], hidden_NI[rows], bank.counts, target.down, accumulate=target.accumulate)
        _weight_gradients(grad_pre_N2I[rows], rows_NH[rows], bank.counts, target.gate_up, accumulate=target.accumulate)
        _rows_times_weights(grad_pre_N2I[rows], bank.gate_up, bank.counts, out=out_NH[rows], transpose=False)


def _ranges(banks: Sequence[Bank]) -> Iterator[tuple[Bank, slice]]:
    start = 0
    for bank in banks:
        yield bank, slice(start, start + bank.rows)
        start += bank.rows


def _group_slices(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count


def _grouped(rows: torch.Tensor) -> bool:
    return rows.is_cuda and rows.dtype in _GROUPED_DTYPES


def _offsets(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    ends, total = [], 0
    for count in counts:
        total += count
        ends.append(total)
    host = torch.tensor(ends, dtype=torch.int32)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _rows_times_weights(
    rows: torch.Tensor, weights: torch.Tensor, counts: Sequence[int], *, out: torch.Tensor, transpose: bool
) -> None:
    """out[group] = rows[group] @ weights[group] (transposed first if `transpose`), in the rows' dtype."""
    if rows.shape[0] == 0:
        return
    weights = weights.to(rows.dtype)
    if transpose:
        weights = weights.transpose(1, 2)
    if _grouped(rows):
        out.copy_(functional.grouped_mm(rows, weights, offs=_offsets(counts, rows.device)))
        return
    slices = weights.unbind(0)
    for group, part in _group_slices(counts):
        torch.mm(rows[part], slices[group], out=out[part])


def _weight_gradients(
    grads: torch.Tensor, rows: torch.Tensor, counts: Sequence[int], target: torch.Tensor, *, accumulate: bool
) -> None:
    """target[group] (+)= grads[group]^T @ rows[group]; groups without rows become zero unless accumulated to."""
    if _grouped(rows) and target.dtype == rows.dtype and not accumulate and rows.shape[0]:
        target.copy_(functional.grouped_mm(grads.t(), rows, offs=_offsets(counts, rows.device)))
        return
    if not accumulate:
        for group, count in enumerate(counts):
            if not count:
                target[group].zero_()
    for group, part in _group_slices(counts):
        _product_into(grads[part].t(), rows[part], target[group], accumulate=accumulate)


def _product_into(left: torch.Tensor, right: torch.Tensor, target: torch.Tensor, *, accumulate: bool) -> None:
    if target.dtype != right.dtype:
        # The product of two bf16 matrices is summed in fp32 anyway; rounding it before it is added would lose that.
        if right.is_cuda:
            product = torch.mm(left, right, out_dtype=target.dtype)
            target.add_(product) if accumulate else target.copy_(product)
            return
        left, right = left.to(target.dtype), right.to(target.dtype)
    if accumulate:
        target.addmm_(left, right)
    else:
        torch.mm(left, right, out=target)


def _activate(pre_N2I: torch.Tensor, activation: nn.Module, workspace: Workspace) -> torch.Tensor:
    gate, up = pre_N2I.chunk(2, dim=-1)
    if _is_silu(activation):
        return _silu(gate, workspace).mul_(up)
    hidden: torch.Tensor = activation(gate)
    return hidden.mul_(up) if hidden is not gate else hidden * up


def _silu(gate: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten.silu.out(gate, out=workspace.take("hidden", gate.shape[0], gate.shape[1], gate))
    return out


def _activate_backward(
    grad_NI: torch.Tensor, pre_N2I: torch.Tensor, activation: nn.Module, workspace: Workspace
) -> tuple[torch.Tensor, torch.Tensor]:
    """(act(gate) * up, gradient of the pre-activations)."""
    gate, up = pre_N2I.chunk(2, dim=-1)
    if _is_silu(activation):
        grad_pre = workspace.take("grad pre", pre_N2I.shape[0], pre_N2I.shape[1], pre_N2I)
        grad_gate, grad_up = grad_pre.chunk(2, dim=-1)
        hidden = _silu(gate, workspace)
        torch.mul(grad_NI, hidden, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_NI.mul_(up), gate, grad_input=grad_gate)
        return hidden.mul_(up), grad_pre
    with torch.enable_grad():
        leaf = pre_N2I.detach().requires_grad_()
        leaf_gate, leaf_up = leaf.chunk(2, dim=-1)
        product = activation(leaf_gate) * leaf_up
        (grad_pre,) = torch.autograd.grad(product, leaf, grad_NI)
    return product.detach(), grad_pre


def _is_silu(activation: nn.Module) -> bool:
    return isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
