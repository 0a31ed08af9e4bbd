"""Which layers of a transformers model hold experts, and how many experts each token may choose from.

transformers 5 gives every Mixture-of-Experts block a sub-module `experts` that is called with (hidden states, chosen
experts, weights). Going by that one convention covers Qwen3-MoE, Mixtral, DeepSeek, GLM and their kin alike.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from foremoe.errors import RoutingError

_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.+\.)?experts$")
_EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


def experts_modules(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """The `experts` module of every Mixture-of-Experts layer, by decoder layer index, in order."""
    found = {int(match[1]): module for name, module in model.named_modules() if (match := _EXPERTS.search(name))}
    return dict(sorted(found.items()))


def expert_count(config: Any) -> int:
    """Routed experts of each layer. Raises RoutingError if the configuration names none."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for field in _EXPERT_COUNT_FIELDS:
        value = getattr(text, field, None)
        if isinstance(value, int) and value > 0:
            return value
    raise RoutingError(
        f"{type(config).__name__} has none of {', '.join(_EXPERT_COUNT_FIELDS)}: is it a Mixture-of-Experts model?"
    )


def choices(config: Any) -> int | None:
    """Experts each token chooses; None if the configuration does not say."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    value = getattr(text, "num_experts_per_tok", None)
    return value if isinstance(value, int) else None
