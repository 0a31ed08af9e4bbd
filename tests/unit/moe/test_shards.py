"""Shares of home experts, without process groups (tests/distributed has the exchange)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foremoe.moe.shards import GatheredExperts, join_rows, split_rows


@pytest.mark.parametrize(("rows", "twins"), [(6, 2), (6, 4), (7, 3), (5, 1), (2, 4)])
def test_shares_are_equal_in_size_and_join_to_the_whole(rows: int, twins: int) -> None:
    whole = torch.randn(3, rows, 5, dtype=torch.float64)
    shares = split_rows(whole, twins)
    assert shares.shape == (twins, 3, -(-rows // twins), 5)
    assert shares.is_contiguous()
    assert torch.equal(join_rows(shares, torch.full_like(whole, float("nan"))), whole)
    assert shares.abs().sum() == pytest.approx(float(whole.abs().sum()))  # whatever fills up is zero


def test_joining_converts() -> None:
    whole = torch.randn(2, 4, 3)
    joined = join_rows(split_rows(whole, 2).bfloat16(), torch.empty(2, 4, 3, dtype=torch.bfloat16))
    assert torch.equal(joined, whole.bfloat16())


@pytest.fixture
def layer() -> tuple[list[nn.Parameter], GatheredExperts]:
    parameters = [nn.Parameter(torch.zeros(2, 3, 4)), nn.Parameter(torch.zeros(2, 2, 3))]
    return parameters, GatheredExperts(lambda: parameters, rows=[6, 4], dtype=torch.bfloat16)


def test_weights_are_stale_after_any_change(layer: tuple[list[nn.Parameter], GatheredExperts]) -> None:
    parameters, gathered = layer
    assert not gathered.fresh

    def brought_up_to_date() -> None:
        gathered.gathered()
        assert gathered.fresh

    assert [tuple(weight.shape) for weight in gathered.weights] == [(2, 6, 4), (2, 4, 3)]
    assert gathered.weights[0].dtype == torch.bfloat16
    brought_up_to_date()
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not gathered.fresh
    brought_up_to_date()
    parameters[1].data = parameters[1].data + 1  # not counted by torch
    gathered.changed()
    assert not gathered.fresh
    brought_up_to_date()
    parameters[0] = nn.Parameter(parameters[0].detach().clone())
    assert not gathered.fresh
    brought_up_to_date()
    gathered.release()
    assert not gathered.fresh


def test_gradients_add_up_in_fp32_and_are_taken_once(layer: tuple[list[nn.Parameter], GatheredExperts]) -> None:
    _, gathered = layer
    first = gathered.open_gradients()
    assert not first.accumulate
    assert first.gate_up.dtype == torch.float32
    first.gate_up.fill_(1.0)
    first.down.fill_(2.0)
    assert gathered.open_gradients().accumulate
    gathered.add(1, [torch.full((6, 4), 0.5), torch.full((4, 3), 0.25)])
    gate_up, down = gathered.take_sums()
    assert gate_up[:, 0, 0].tolist() == [1.0, 1.5]
    assert down[:, 0, 0].tolist() == [2.0, 2.25]
    assert all(not total.any() for total in gathered.take_sums())
    gathered.add(0, [torch.ones(6, 4), torch.ones(4, 3)])
    assert gathered.take_sums()[0][:, 0, 0].tolist() == [1.0, 0.0]
