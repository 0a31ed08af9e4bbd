"""A small MoE model on disk, and batches as veRL's trainer hands them to an engine, with a record of their routing.

Routes are what the model itself chooses before any update, recorded as a rollout engine does: zeros for the last token,
for samples without a record and for padding samples. So the first mini-batch is the case in which replay changes
nothing, and every later one the case in which it matters.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

VOCABULARY = 61
EXPERTS, TOP_K, LAYERS = 8, 2, 3
PADDING_TOKENS = 6


def make_model_directory(directory: Path, *, tie: bool = False) -> str:
    """A Qwen3-MoE with routers wide enough to choose, saved in plain Hugging Face format."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        norm_topk_prob=True, max_position_embeddings=128, tie_word_embeddings=tie, mlp_only_layers=[1],
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(directory)
    return str(directory)


@dataclass(frozen=True, kw_only=True)
class Sample:
    prompt: int
    response: int
    trained: bool = True
    recorded: bool = True


SAMPLES = (
    Sample(prompt=4, response=7),
    Sample(prompt=3, response=9),
    # A sample that is trained on but whose record got lost, and one that only fills the batch up.
    Sample(prompt=5, response=4, recorded=False),
    Sample(prompt=1, response=PADDING_TOKENS - 1, trained=False, recorded=False),
    Sample(prompt=2, response=5),
    Sample(prompt=4, response=3),
)


def make_batch(model_directory: str, *, seed: int, step: int, **settings: Any) -> Any:
    """One rank's mini-batch as a TensorDict. `settings` are veRL's non-tensor fields of a batch."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    rows: dict[str, list[torch.Tensor]] = {}
    for sample in SAMPLES:
        length = sample.prompt + sample.response
        ids = torch.randint(2, VOCABULARY, (length,), generator=generator)
        mask = torch.full((sample.response,), int(sample.trained))
        fields = {
            "input_ids": ids,
            "prompts": ids[: sample.prompt],
            "responses": ids[sample.prompt :],
            "position_ids": torch.arange(length),
            "response_mask": mask,
            "loss_mask": torch.cat([torch.zeros(sample.prompt, dtype=mask.dtype), mask]),
            "old_log_probs": -2.0 - torch.rand(sample.response, generator=generator),
            "advantages": torch.randn(sample.response, generator=generator),
        }
        for name, value in fields.items():
            rows.setdefault(name, []).append(value)
    rows["routed_experts"] = record_of(model_directory, rows["input_ids"])
    nested = {name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in rows.items()}
    plain = {
        "temperature": 1.0, "global_batch_size": None, "global_steps": step, "use_remove_padding": False,
        "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "use_fused_kernels": False, "pad_token_id": 0,
        **settings,
    }  # fmt: skip
    return tu.get_tensordict(nested, non_tensor_dict=plain)


@functools.cache
def recorder(model_directory: str) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """The model of a directory, and where every forward leaves the choices of each MoE layer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_directory, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    chosen: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            block.mlp.gate.register_forward_hook(
                lambda _module, _inputs, out, layer=layer: chosen.__setitem__(layer, out[2])
            )
    return model, chosen


@torch.no_grad()
def record_of(model_directory: str, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    """int16 [tokens, decoder layers, top_k] per sample, as the rollout's `routed_experts`."""
    model, chosen = recorder(model_directory)
    records = []
    for sample, ids in zip(SAMPLES, prompts, strict=True):
        record = torch.zeros(len(ids), LAYERS, TOP_K, dtype=torch.int16)
        if sample.recorded:
            model(input_ids=ids[None, :-1], use_cache=False)
            for layer, routes in chosen.items():
                record[:-1, layer] = routes.to(torch.int16)
        records.append(record)
    return records


def make_dense_directory(directory: Path) -> str:
    """A model without experts."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return str(directory)
