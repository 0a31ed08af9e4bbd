"""Small MoE models, skewed routing, and the dense single-process reference that every case is compared with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import nn

from foremoe.moe import NO_RECORD, SKIP, adapter_for

LAYERS = 3
VOCABULARY = 48
MODEL_TYPES = ("qwen3_moe", "mixtral", "deepseek_v3", "olmoe")


def make_model(
    model_type: str,
    *,
    experts: int = 8,
    top_k: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    layers: int = LAYERS,
    **changes: object,
) -> nn.Module:
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "attn_implementation": "eager",
        "tie_word_embeddings": False,
    }
    own: dict[str, dict[str, object]] = {
        "qwen3_moe": {"num_experts": experts, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 8},
        "olmoe": {"num_experts": experts, "norm_topk_prob": False},
        "mixtral": {"num_local_experts": experts, "head_dim": 8},
        "deepseek_v3": {
            "n_routed_experts": experts,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    }
    config = transformers.AutoConfig.for_model(model_type, **{**common, **own[model_type], **changes})
    torch.manual_seed(seed)
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    return model.to(dtype).train()


def moe_layers(model: nn.Module) -> int:
    return len(adapter_for(model).sites(model))


def make_steep(model: nn.Module) -> None:
    """Where gradients peak: routers that give recorded experts next to nothing, tokens whose embedding is nearly zero.

    The first layer normalises an embedding, so the gradient of a small one is large.
    """
    with torch.no_grad():
        for site in adapter_for(model).sites(model):
            site.block.get_submodule("gate").get_parameter("weight").mul_(10.0)
        model.get_input_embeddings().weight[::2].mul_(1e-2)


@dataclass
class Batch:
    """One micro-step of one rank."""

    ids_BT: torch.Tensor
    routing_TLK: torch.Tensor
    probe: torch.Tensor


def make_batches(
    *,
    ranks: int,
    lengths_MS: Sequence[Sequence[int]],
    layers: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
    skew: float = 3.0,
    only: Sequence[int] | None = None,
    seed: int = 1,
) -> list[list[Batch]]:
    """[M][S] batches; a length of 0 is one filler token of weight 0 and an empty record.

    `skew`: weight of the first half of the experts; `only`: experts that may be chosen at all.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.ones(layers, experts, dtype=torch.float64)
    # Every layer prefers experts of its own, or one layer's routing could stand in for another's unnoticed.
    for layer in range(layers):
        weight[layer, torch.arange(experts // 2) + layer % (experts // 2 + 1)] = skew
    if only is not None:
        allowed = torch.zeros(experts, dtype=torch.bool)
        allowed[list(only)] = True
        weight[:, ~allowed] = 0.0
    batches = []
    for lengths in lengths_MS:
        assert len(lengths) == ranks
        row = []
        for length in lengths:
            tokens = max(length, 1)
            routing = torch.stack(
                [
                    torch.stack([torch.multinomial(weight[layer], top_k, generator=generator) for _ in range(length)])
                    if length
                    else torch.zeros(0, top_k, dtype=torch.int64)
                    for layer in range(layers)
                ],
                dim=1,
            )
            probe = torch.randn(1, tokens, VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
            if not length:
                probe.zero_()
            ids = torch.randint(VOCABULARY, (1, tokens), generator=generator)
            row.append(Batch(ids_BT=ids, routing_TLK=routing, probe=probe))
        batches.append(row)
    return batches


def loss_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, logits)"""
    logits = model(input_ids=batch.ids_BT, use_cache=False).logits
    return (logits * batch.probe).sum(), logits.detach().clone()


class DenseReference:
    """The same model in one process, with the same forced choices by the model's own experts."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self._ids: torch.Tensor | None = None
        adapter = adapter_for(self.model)
        for layer, site in enumerate(adapter.sites(self.model)):
            adapter.install(site, lambda live, layer=layer: self._choose(layer, live))
            site.experts.register_forward_pre_hook(
                lambda _module, inputs, layer=layer: self._drop_skipped(layer, inputs)
            )

    def _choose(self, layer: int, live_TK: torch.Tensor) -> torch.Tensor:
        if self._ids is None or not self._ids.shape[0]:
            return live_TK
        return torch.where(self._ids[:, layer] >= 0, self._ids[:, layer], live_TK)

    def _drop_skipped(self, layer: int, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._ids is None or not self._ids.shape[0]:
            return None
        hidden, ids, weights = inputs
        return hidden, ids, weights * (self._ids[:, layer] != SKIP)

    def run(self, batch: Batch, *, live: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        record = batch.routing_TLK
        tokens = batch.ids_BT.shape[1]
        if record.shape[0] < tokens:
            fill = torch.full((tokens - record.shape[0], *record.shape[1:]), NO_RECORD)
            record = torch.cat([record, fill])
        self._ids = None if live else record[:tokens]
        return loss_of(self.model, batch)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.model.named_parameters()}


def worst_error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest error relative to each tensor's largest entry, and its name; every tensor must be there."""
    assert set(got) == set(expected), sorted(set(got) ^ set(expected))
    largest = max((float(value.abs().max()) for value in expected.values() if value.numel()), default=1.0)
    worst, where = 0.0, ""
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        # A tensor that is zero up to rounding is measured against the whole.
        scale = max(float(value.abs().max()), 1e-6 * largest)
        error = float((got[name].double() - value.double()).abs().max()) / scale
        assert error == error, f"{name} is not finite"
        if error > worst:
            worst, where = error, name
    return worst, where
