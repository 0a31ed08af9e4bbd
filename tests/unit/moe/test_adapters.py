"""Replay changes the choice only: weights are the model's own numbers and the router keeps its gradient."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.moe_models import MODEL_TYPES, make_model
from torch import nn

from foremoe.errors import PlannerError
from foremoe.moe import adapter_for, register_adapter
from foremoe.moe.adapters import _ADAPTERS, Qwen3MoeAdapter


def capture(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, weights) that reach the experts of every MoE layer."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for site in adapter_for(model).sites(model):
        site.experts.register_forward_pre_hook(lambda _module, inputs: seen.append((inputs[1], inputs[2])))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_forcing_the_live_choice_changes_nothing(model_type: str, dtype: torch.dtype) -> None:
    model = make_model(model_type, dtype=dtype)
    tokens = torch.arange(12)[None]
    seen = capture(model)
    plain = model(input_ids=tokens, use_cache=False).logits
    adapter = adapter_for(model)
    undo = [adapter.install(site, lambda live: live.clone()) for site in adapter.sites(model)]
    forced = model(input_ids=tokens, use_cache=False).logits
    half = len(seen) // 2
    for (ids, weights), (again, replayed) in zip(seen[:half], seen[half:], strict=True):
        assert torch.equal(ids, again)
        assert replayed.dtype == weights.dtype
        torch.testing.assert_close(replayed, weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(forced, plain, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6)
    for each in undo:
        each()
    seen.clear()
    assert torch.equal(model(input_ids=tokens, use_cache=False).logits, plain)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_forced_weights_sum_like_the_models_own_and_reach_the_router(model_type: str) -> None:
    model = make_model(model_type)
    adapter, seen = adapter_for(model), capture(model)
    for site in adapter.sites(model):
        adapter.install(site, lambda live: torch.flip(7 - live, dims=[-1]))
    model(input_ids=torch.arange(9)[None], use_cache=False).logits.pow(2).sum().backward()
    for _, weights in seen:
        total = weights.sum(dim=-1)
        if model_type in ("qwen3_moe", "mixtral"):
            torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-6, atol=0)
        elif model_type == "deepseek_v3":
            torch.testing.assert_close(total, torch.full_like(total, 1.5), rtol=1e-6, atol=0)
        else:
            assert (total < 1).all()
    for site in adapter.sites(model):
        gradient = site.block.gate.weight.grad
        assert gradient is not None
        assert float(gradient.abs().max()) > 0


def test_dense_first_layers_are_not_sites() -> None:
    model = make_model("deepseek_v3")
    sites = adapter_for(model).sites(model)
    assert [site.decoder_layer for site in sites] == [1, 2]


def test_an_adapter_can_be_registered() -> None:
    model = make_model("qwen3_moe")
    model.config.model_type = "my_moe"
    with pytest.raises(PlannerError, match="my_moe"):
        adapter_for(model)

    class Mine(Qwen3MoeAdapter):
        model_types = ("my_moe",)

    register_adapter(Mine())
    try:
        assert len(adapter_for(model).sites(model)) == 3
    finally:
        del _ADAPTERS["my_moe"]
