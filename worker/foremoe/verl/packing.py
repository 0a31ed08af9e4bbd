"""From veRL's weights to transformers' names: one tensor per expert becomes packed ones.

veRL streams a policy's weights under the names that inference engines load, one two-dimensional tensor per expert and
projection. transformers keeps each layer's experts in two three-dimensional tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt
import torch

from foremoe.errors import TransferError


def pack_experts(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, npt.NDArray[Any]]:
    """From veRL's one tensor per expert to transformers' packed ones: gate and up joined, experts stacked.

    Raises TransferError, naming the expert, if a projection is missing.
    """
    named: dict[str, npt.NDArray[Any]] = {}
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, weight in weights:
        tensor = weight.detach().float().cpu()
        prefix, found, rest = name.partition(".experts.")
        parts = rest.split(".")
        if found and len(parts) == 3 and parts[0].isdigit():
            experts.setdefault(f"{prefix}.experts", {})[int(parts[0]), parts[1]] = tensor
        else:
            named[name] = tensor.numpy()
    for prefix, pieces in experts.items():
        count = 1 + max(expert for expert, _ in pieces)
        for expert in range(count):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                if (expert, projection) not in pieces:
                    raise TransferError(f"weight update lacks {projection} of {prefix}", expert=expert)
        joined = [torch.cat([pieces[e, "gate_proj"], pieces[e, "up_proj"]]) for e in range(count)]
        named[f"{prefix}.gate_up_proj"] = torch.stack(joined).numpy()
        named[f"{prefix}.down_proj"] = torch.stack([pieces[e, "down_proj"] for e in range(count)]).numpy()
    return named
