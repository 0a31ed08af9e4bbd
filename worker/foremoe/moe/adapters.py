"""What differs between Hugging Face MoE models, one small class each.

The expert-parallel layer needs three facts of a model: where its MoE blocks are, where the router can be made to
choose given experts, and how the router turns logits into weights. The last one is repeated here operation by
operation in the model's own order and dtype (transformers 5.9): a softmax over the chosen logits alone, or a cast in
another place, is a different number, and rollout and training would drift apart.

Always: only the *choice* is replaced. Weights come from the live logits, so the router keeps its gradient. A row that
is not forced keeps the router's own choice. Auxiliary losses read the live logits and are not touched.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from foremoe.errors import PlannerError

__all__ = ["MoESite", "ModelAdapter", "adapter_for", "register_adapter", "supported_model_types"]

ChooseIds = Callable[[torch.Tensor], torch.Tensor]
"""Live expert ids [T, K] of one layer -> the ids to use."""


@dataclass(frozen=True, kw_only=True)
class MoESite:
    """One MoE block of a model."""

    name: str
    """Module path of the block, for example `model.layers.3.mlp`."""
    decoder_layer: int
    """Index of its decoder layer; differs from the MoE layer's index behind dense first layers."""
    block: nn.Module

    @property
    def experts(self) -> nn.Module:
        """The module that holds the packed experts."""
        return self.block.get_submodule("experts")


class ModelAdapter(ABC):
    """One family of models that keep routed experts as `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]."""

    model_types: ClassVar[tuple[str, ...]]
    """Values of `config.model_type` this adapter serves."""

    def sites(self, model: nn.Module) -> list[MoESite]:
        """All MoE blocks, in model order. Raises PlannerError if there is none or its layout is unknown."""
        found: list[MoESite] = []
        for name, block in model.named_modules():
            experts, gate = getattr(block, "experts", None), getattr(block, "gate", None)
            if not isinstance(experts, nn.Module) or not isinstance(gate, nn.Module):
                continue
            _check_packed(name, experts)
            index = re.search(r"\.(\d+)\.", name)
            found.append(MoESite(name=name, decoder_layer=int(index.group(1)) if index else len(found), block=block))
        if not found:
            raise PlannerError(f"{type(model).__name__} has no MoE layer: nothing to distribute")
        return found

    @abstractmethod
    def top_k(self, site: MoESite) -> int:
        """Experts per token."""

    @abstractmethod
    def install(self, site: MoESite, choose: ChooseIds) -> Callable[[], None]:
        """Let `choose` decide the experts of this block from now on; returns what undoes it."""


class TopKRouterAdapter(ModelAdapter):
    """Models whose router module itself returns (logits, weights, ids)."""

    @abstractmethod
    def weigh(self, router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Weights [T, K] the model gives to `ids_TK`."""

    def top_k(self, site: MoESite) -> int:
        """Experts per token."""
        return int(getattr(site.block.get_submodule("gate"), "top_k"))  # noqa: B009  # nn.Module attributes are untyped

    def install(self, site: MoESite, choose: ChooseIds) -> Callable[[], None]:
        """A forward hook on the router."""

        def replay(router: nn.Module, _inputs: Any, output: Any) -> Any:
            logits_TE, _, live_TK = output
            ids_TK = choose(live_TK)
            if ids_TK is live_TK:
                return None
            return logits_TE, self.weigh(router, logits_TE, ids_TK), ids_TK

        handle = site.block.get_submodule("gate").register_forward_hook(replay)
        return handle.remove


class Qwen3MoeAdapter(TopKRouterAdapter):
    """Qwen3-MoE and OLMoE: softmax in fp32, optional renormalisation, cast back to the logits' dtype."""

    model_types = ("qwen3_moe", "olmoe")

    def weigh(self, router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Weights [T, K] the model gives to `ids_TK`."""
        weights_TK = functional.softmax(logits_TE, dtype=torch.float, dim=-1).gather(-1, ids_TK)
        if router.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK.to(logits_TE.dtype)


class MixtralAdapter(TopKRouterAdapter):
    """Mixtral: softmax in fp32, always renormalised, weights stay fp32."""

    model_types = ("mixtral",)

    def weigh(self, router: Any, logits_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        """Weights [T, K] the model gives to `ids_TK`."""
        weights_TK = functional.softmax(logits_TE.float(), dim=-1).gather(-1, ids_TK)
        return weights_TK / weights_TK.sum(dim=-1, keepdim=True)


class DeepseekV3Adapter(ModelAdapter):
    """DeepSeek-V3: the router returns logits only, the block turns them into a choice and weights."""

    model_types = ("deepseek_v3",)

    def top_k(self, site: MoESite) -> int:
        """Experts per token."""
        return int(getattr(site.block, "top_k"))  # noqa: B009  # nn.Module attributes are untyped

    def install(self, site: MoESite, choose: ChooseIds) -> Callable[[], None]:
        """Wrap the block's own `route_tokens_to_experts`."""
        block: Any = site.block
        live_route = block.route_tokens_to_experts

        def route(logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            live_TK, live_weights_TK = live_route(logits_TE)
            ids_TK = choose(live_TK)
            if ids_TK is live_TK:
                return live_TK, live_weights_TK
            weights_TK = logits_TE.sigmoid().gather(1, ids_TK)
            if block.norm_topk_prob:
                weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
            return ids_TK, weights_TK * block.routed_scaling_factor

        block.route_tokens_to_experts = route

        def remove() -> None:
            del block.route_tokens_to_experts

        return remove


_ADAPTERS: dict[str, ModelAdapter] = {}


def register_adapter(adapter: ModelAdapter) -> None:
    """Serve the model types of `adapter`; a later registration replaces an earlier one."""
    for model_type in adapter.model_types:
        _ADAPTERS[model_type] = adapter


for _adapter in (Qwen3MoeAdapter(), MixtralAdapter(), DeepseekV3Adapter()):
    register_adapter(_adapter)


def supported_model_types() -> frozenset[str]:
    """Values of `config.model_type` that have an adapter."""
    return frozenset(_ADAPTERS)


def adapter_for(model: nn.Module) -> ModelAdapter:
    """The adapter of `model`. Raises PlannerError for a model of no registered type."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    adapter = _ADAPTERS.get(model_type) if isinstance(model_type, str) else None
    if adapter is None:
        known = ", ".join(sorted(_ADAPTERS))
        raise PlannerError(
            f"{type(model).__name__} (model_type {model_type!r}) is no MoE model this version knows; known: {known}. "
            "foremoe.moe.register_adapter adds one"
        )
    return adapter


def _check_packed(name: str, experts: nn.Module) -> None:
    parameters = dict(experts.named_parameters())
    gate_up, down = parameters.pop("gate_up_proj", None), parameters.pop("down_proj", None)
    if gate_up is None or down is None or parameters or gate_up.ndim != 3 or down.ndim != 3:
        raise PlannerError(
            f"{name}.experts is not in the packed layout (gate_up_proj [E, 2I, H], down_proj [E, H, I] and nothing "
            "else); load the model with transformers 5.9 or newer, or register an adapter"
        )
    experts_count, twice_width, hidden = gate_up.shape
    if tuple(down.shape) != (experts_count, hidden, twice_width // 2):
        raise PlannerError(f"{name}.experts: down_proj {list(down.shape)} does not fit {list(gate_up.shape)}")
