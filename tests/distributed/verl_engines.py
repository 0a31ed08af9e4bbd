"""veRL's engines in plain processes, and what they hold: shared by all cases (see `launch`).

An engine is made and fed as veRL's worker does it: Ray and the trainer would cost a minute a run and add nothing to
what is compared. Both engines see the same batches; the stock one can force the record too.
"""

from __future__ import annotations

import json
import os
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.distributed.verl_batches import TOP_K, make_batch

MOE_LAYERS = [0, 2]
# The planner moves no weights for a handful of tokens on a fast GPU; a slow one makes replicas pay at this size too.
PLANNER = {"cost": {"utilisation": 1e-7}}
# Unselected rows of a router get rounding noise as gradient; a tiny eps would turn its sign into a full step.
OPTIMIZER = {"lr": 3e-3, "weight_decay": 0.1, "clip_grad": 0.1, "override_optimizer_config": {"eps": 1e-4}}


def prepare_process(*, expert_parallel: int | None = None, planner: str = "{}") -> None:
    """Environment and plugins, as the agent and veRL's import would have it."""
    if planner.startswith("{"):
        planner = json.dumps({**PLANNER, **json.loads(planner)})
    os.environ.update(VERL_PLATFORM="cpu", FOREMOE_PLANNER_CONFIG=planner)
    os.environ["FOREMOE_EXPERT_PARALLEL"] = str(expert_parallel or "")
    for module in ("foremoe.verl.plugin", "foremoe.verl.engine"):
        import_module(module)


def make_engine(
    directory: str,
    *,
    stock: bool = False,
    forward_only: bool = False,
    checkpointing: bool = False,
    packed: bool = False,
    param_dtype: str = "fp32",
    save: tuple[str, ...] = ("model", "optimizer", "extra"),
    **engine_settings: Any,
) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    configs: dict[str, Any] = {
        "model_config": HFModelConfig(
            path=directory, load_tokenizer=False, use_remove_padding=packed,
            enable_gradient_checkpointing=checkpointing, override_config={"attn_implementation": "sdpa"},
        ),
        "engine_config": FSDPEngineConfig(
            strategy="fsdp2", forward_only=forward_only, use_torch_compile=False,
            mixed_precision={"param_dtype": param_dtype}, use_remove_padding=packed, **engine_settings,
        ),
        "optimizer_config": FSDPOptimizerConfig(total_training_steps=10, **OPTIMIZER),
        "checkpoint_config": CheckpointConfig(save_contents=list(save)),
    }  # fmt: skip
    if stock:
        engine = forced_stock_class()(**configs)
    else:
        engine = EngineRegistry.new("language_model", "fsdp2", **configs)
    engine.initialize()
    return engine


def forced_stock_class() -> type:
    """veRL's engine; with `force` set it replays the record by a hook, on full experts."""
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    from verl.utils import tensordict_utils as tu

    from foremoe.moe.adapters import Qwen3MoeAdapter
    from foremoe.verl.expert_rows import Layout, layer_rows
    from foremoe.verl.rows import recorded_routes

    class Stock(fsdp.FSDPEngineWithLMHead):
        force = False

        def initialize(self) -> None:
            super().initialize()
            blocks = [self.module.model.layers[layer].mlp for layer in MOE_LAYERS]
            for index, block in enumerate(blocks):
                block.gate.register_forward_hook(partial(self._replay, index))

        def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
            if self.force:
                layout = Layout(
                    packed=tu.get_non_tensor_data(micro_batch, "use_remove_padding", True),
                    bucket=self.pad_to_length_bucket if self.pad_to_length else 1,
                )
                routes = recorded_routes(micro_batch, moe_layers=MOE_LAYERS)
                self._ids = layer_rows(micro_batch, routes, layers=len(MOE_LAYERS), top_k=TOP_K, layout=layout).long()
            return super().forward_step(micro_batch, loss_function, forward_only)

        def _replay(self, index: int, router: Any, _inputs: Any, output: Any) -> Any:
            if not self.force:
                return None
            logits, _, live = output
            ids = self._ids[:, index]
            distinct = (ids[:, :1] != ids[:, 1:]).all(dim=1, keepdim=True) & (ids >= 0).all(dim=1, keepdim=True)
            ids = torch.where(distinct, ids, live)
            return logits, Qwen3MoeAdapter().weigh(router, logits, ids), ids

    return Stock


def loss_function() -> Any:
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        strategy="fsdp2", ppo_micro_batch_size_per_gpu=2, rollout_n=1, use_torch_compile=False, ppo_mini_batch_size=8
    )
    return partial(ppo_loss, config)


def state_of(engine: Any, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    runtime = getattr(engine, "_runtime", None)
    if runtime is not None:
        return runtime.full_gradients() if gradients else runtime.full_state_dict()
    held = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
    values = held if gradients else engine.module.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def update(engine: Any, batch: Any) -> dict[str, Any]:
    """One mini-batch; what it did, complete on every rank."""
    engine.optimizer_zero_grad()
    with engine.train_mode():
        output = engine.forward_backward_batch(batch, loss_function(), forward_only=False)
        gradients = {name: value.clone() for name, value in state_of(engine, gradients=True).items()}
        norm = engine.optimizer_step()
        engine.lr_scheduler_step()
    return {
        "loss": float(torch.tensor(output["loss"]).sum()),
        "gradients": gradients,
        "norm": norm,
        "parameters": {name: value.clone() for name, value in state_of(engine).items()},
        "owned": expert_elements(engine),
        "metrics": {name: value for name, value in output["metrics"].items() if name.startswith("foremoe/")},
    }


def expert_elements(engine: Any) -> dict[str, int]:
    """How many elements of experts this rank's parameters and their optimizer state have."""
    if not hasattr(engine, "_runtime"):
        return {}
    owned = engine._runtime.expert_parameters()
    states = [engine.optimizer.state[parameter] for parameter in owned]
    return {"weight": sum(each.numel() for each in owned)} | {
        key: sum(state[key].numel() for state in states) for key in ("exp_avg", "exp_avg_sq")
    }


def log_probs(engine: Any, batch: Any) -> torch.Tensor:
    with engine.eval_mode(), torch.no_grad():
        output = engine.forward_backward_batch(batch, None, forward_only=True)
    flat = output["model_output"]["log_probs"].values()
    return flat[torch.roll(batch["loss_mask"].values(), -1).bool()]


def batches_of(directory: str, rank: int, **settings: Any) -> list[Any]:
    return [make_batch(directory, seed=100 * part + rank, step=1, **settings) for part in range(2)]


def worst(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert set(got) == set(expected), sorted(set(got) ^ set(expected))
    return max(
        (float((got[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)), name)
        for name, value in expected.items()
    )


def equal_bits(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values differ in any bit."""
    assert set(got) == set(expected)
    return [name for name, value in expected.items() if not torch.equal(got[name], value)]
