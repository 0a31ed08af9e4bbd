from __future__ import annotations

import pytest
import torch
from torch import nn

from foremoe.moe import experts as module
from foremoe.moe.experts import Bank, BankGradient, backward_experts, forward_experts
from foremoe.moe.workspace import Workspace

HIDDEN, WIDTH = 16, 32


def make_banks(dtype: torch.dtype) -> list[Bank]:
    torch.manual_seed(0)
    sizes = [[3, 0, 5], [2], [0, 4]]
    return [
        Bank(
            gate_up=torch.randn(len(counts), 2 * WIDTH, HIDDEN, dtype=dtype),
            down=torch.randn(len(counts), HIDDEN, WIDTH, dtype=dtype),
            counts=counts,
        )
        for counts in sizes
    ]


def reference(
    rows: torch.Tensor, banks: list[Bank], activation: nn.Module, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    rows = rows.clone().requires_grad_()
    weights = [(b.gate_up.clone().requires_grad_(), b.down.clone().requires_grad_()) for b in banks]
    outputs, start = [], 0
    for bank, (gate_up, down) in zip(banks, weights, strict=True):
        for group, count in enumerate(bank.counts):
            gate, up = (rows[start : start + count] @ gate_up[group].t()).chunk(2, dim=-1)
            outputs.append((activation(gate) * up) @ down[group].t())
            start += count
    out = torch.cat(outputs)
    out.backward(grad)
    return out.detach(), rows.grad, [(a.grad, b.grad) for a, b in weights]


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.Identity()], ids=["silu", "gelu", "identity"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_forward_and_backward_equal_autograd(activation: nn.Module, accumulate: bool) -> None:
    banks = make_banks(torch.float64)
    rows, grad = torch.randn(14, HIDDEN, dtype=torch.float64), torch.randn(14, HIDDEN, dtype=torch.float64)
    out_wanted, rows_wanted, weights_wanted = reference(rows, banks, activation, grad)
    out = torch.empty_like(rows)
    pre = forward_experts(rows, banks, activation, out_NH=out, workspace=Workspace())
    torch.testing.assert_close(out, out_wanted)
    targets = [
        BankGradient(gate_up=torch.ones_like(b.gate_up), down=torch.ones_like(b.down), accumulate=accumulate)
        for b in banks
    ]
    rows_grad = torch.empty_like(rows)
    backward_experts(grad, rows, pre, banks, targets, activation, out_NH=rows_grad, workspace=Workspace())
    torch.testing.assert_close(rows_grad, rows_wanted)
    for target, (gate_up, down) in zip(targets, weights_wanted, strict=True):
        torch.testing.assert_close(target.gate_up, gate_up + accumulate)
        torch.testing.assert_close(target.down, down + accumulate)


def test_bf16_gradients_accumulate_in_fp32_without_rounding_each_part() -> None:
    """A part below half a unit of the sum's bf16 value must not be lost."""
    (bank,) = make_banks(torch.bfloat16)[:1]
    rows, grad = torch.randn(8, HIDDEN).bfloat16(), torch.randn(8, HIDDEN).bfloat16()
    target = BankGradient(
        gate_up=torch.full_like(bank.gate_up, 1000.0, dtype=torch.float32),
        down=torch.full_like(bank.down, 1000.0, dtype=torch.float32),
        accumulate=True,
    )
    out = torch.empty_like(rows)
    pre = forward_experts(rows, [bank], nn.SiLU(), out_NH=out, workspace=Workspace())
    backward_experts(grad, rows, pre, [bank], [target], nn.SiLU(), out_NH=out, workspace=Workspace())
    added = (target.down - 1000.0)[0]
    gate, up = pre[:3].float().chunk(2, dim=-1)
    wanted = grad[:3].float().t() @ (nn.functional.silu(gate) * up)
    torch.testing.assert_close(added, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_kernels_equal_the_loop(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The kernel that runs on GPUs, on a CPU: same products."""
    banks = make_banks(dtype)
    rows, grad = torch.randn(14, HIDDEN).to(dtype), torch.randn(14, HIDDEN).to(dtype)
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(module, "_grouped", lambda _rows, on=grouped: on)
        out, rows_grad = torch.empty_like(rows), torch.empty_like(rows)
        pre = forward_experts(rows, banks, nn.SiLU(), out_NH=out, workspace=Workspace())
        targets = [
            BankGradient(gate_up=torch.empty_like(b.gate_up), down=torch.empty_like(b.down), accumulate=False)
            for b in banks
        ]
        backward_experts(grad, rows, pre, banks, targets, nn.SiLU(), out_NH=rows_grad, workspace=Workspace())
        results.append([out, rows_grad, *(t.gate_up for t in targets), *(t.down for t in targets)])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for loop, kernel in zip(*results, strict=True):
        torch.testing.assert_close(loop, kernel, rtol=tolerance, atol=tolerance * float(loop.abs().max()))


def test_no_rows_at_all() -> None:
    banks = [Bank(gate_up=b.gate_up, down=b.down, counts=[0] * len(b.counts)) for b in make_banks(torch.float64)]
    rows = torch.empty(0, HIDDEN, dtype=torch.float64)
    pre = forward_experts(rows, banks, nn.SiLU(), out_NH=torch.empty_like(rows), workspace=Workspace())
    targets = [
        BankGradient(gate_up=torch.ones_like(b.gate_up), down=torch.ones_like(b.down), accumulate=False) for b in banks
    ]
    backward_experts(rows, rows, pre, banks, targets, nn.SiLU(), out_NH=torch.empty_like(rows), workspace=Workspace())
    assert all(float(t.gate_up.abs().sum() + t.down.abs().sum()) == 0 for t in targets)
