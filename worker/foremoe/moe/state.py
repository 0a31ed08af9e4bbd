"""The whole model, its gradients and its optimizer state, under Hugging Face names and independent of placement.

Experts are gathered, over their twins first where they are sharded, then over the EP group, and put in the order of
their ids; everything else is as the model holds it. So a checkpoint written under one placement, EP size or strategy
loads under any other, and in plain transformers.
Tensors are produced one at a time, for callers that stream them and cannot hold the model twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from foremoe.errors import TransferError
from foremoe.moe.homes import Homes
from foremoe.moe.layer import RoutedExperts
from foremoe.transfer import ControlPlane

__all__ = ["FullState"]


class FullState:
    """Gathers and scatters; every method is collective and must be called with the same names on all ranks."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[RoutedExperts],
        homes: Homes,
        *,
        groups: Sequence[dist.ProcessGroup],
        control: ControlPlane,
    ) -> None:
        """`groups`: the EP group, then the twins if there are any."""
        self._model = model
        self._homes = homes
        self._layers = layers
        self._groups = list(groups)
        self._control = control
        self._layer_of = {id(module): layer for layer, module in enumerate(layers)}

    def named_tensors(self, device: torch.device | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every entry of `model.state_dict()`, complete; moved to `device` first where one is given."""
        experts = self._expert_names()
        for name, value in self._model.state_dict().items():
            part = value.detach() if device is None else value.detach().to(device)
            if name in experts:
                yield name, self._gather(name, experts[name], part)
            else:
                yield name, _complete(part)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `named_tensors`. Raises TransferError for missing or misshapen experts."""
        experts = self._expert_names()
        own: dict[str, torch.Tensor] = {}
        for name, value in self._model.state_dict().items():
            if name not in state:
                raise TransferError(f"{name} is missing in the state to load")
            if name in experts:
                own[name] = self._own_part(name, experts[name], state[name]).to(value.device)
            elif isinstance(value, DTensor):
                from torch.distributed.tensor import distribute_tensor

                own[name] = distribute_tensor(state[name].to(value.device), value.device_mesh, value.placements)
            else:
                own[name] = state[name]
        self._model.load_state_dict(own)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of all trainable parameters; dense ones summed over all ranks unless they are DTensors."""
        experts = self._expert_names()
        full = {}
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                continue
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if name in experts:
                full[name] = self._gather(name, experts[name], grad.detach())
            elif isinstance(grad, DTensor):
                full[name] = grad.full_tensor()
            else:
                total = grad.detach().clone()
                for group in self._groups:
                    with self._control.guard("summing dense gradients"):
                        dist.all_reduce(total, group=group)
                full[name] = total
        return full

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
        """State tensors by parameter name and state name."""
        return {
            name: {
                key: self._gather(name, layer, value) if layer is not None and value.ndim else _complete(value)
                for key, value in sorted(state.items())
                if isinstance(value, torch.Tensor)
            }
            for name, _, layer, state in self._states(optimizer)
        }

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, full: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        """Inverse of `optimizer_state`; state the optimizer has not made yet is created."""
        for name, parameter, layer, state in self._states(optimizer):
            for key, value in full.get(name, {}).items():
                if layer is not None and value.ndim:
                    state[key] = self._own_part(name, layer, value).to(parameter.device).clone()
                elif isinstance(parameter, DTensor) and value.ndim:
                    from torch.distributed.tensor import distribute_tensor

                    state[key] = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                else:
                    state[key] = value.clone()

    def _states(
        self, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, nn.Parameter, int | None, dict[str, Any]]]:
        experts = self._expert_names()
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in held:
                yield name, parameter, experts.get(name), cast("dict[str, Any]", optimizer.state[parameter])

    def home_experts(self) -> dict[str, list[int]]:
        """Expert ids in the rows of every packed parameter of this rank, by name."""
        return {
            name: list(self._homes.order(layer, self._control.rank)) for name, layer in self._expert_names().items()
        }

    def whole(self, name: str, own: torch.Tensor) -> torch.Tensor:
        """[E_local, ...] from this rank's part; collective over the twins."""
        return self._whole(name, self._expert_names()[name], own)

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of [E_local, ...]."""
        shards = self._homes.shards
        return whole if shards is None else shards.own(whole)

    def _whole(self, name: str, layer: int, own: torch.Tensor) -> torch.Tensor:
        shards = self._homes.shards
        return own if shards is None else shards.whole(own, self._rows(name, layer), layer=layer)

    def _rows(self, name: str, layer: int) -> int:
        module = self._layers[layer]
        return module.rows[module.NAMES.index(name.rpartition(".")[2])]

    def _expert_names(self) -> dict[str, int]:
        names = {}
        for prefix, module in self._model.named_modules():
            layer = self._layer_of.get(id(module))
            if layer is not None:
                names.update({f"{prefix}.{name}": layer for name, _ in module.named_parameters(recurse=False)})
        return names

    def _gather(self, name: str, layer: int, own: torch.Tensor) -> torch.Tensor:
        """What every rank keeps of its experts -> [E, ...] in order of expert id."""
        local = self._whole(name, layer, own).contiguous()
        parts = local.new_empty((self._control.size * local.shape[0], *local.shape[1:]))
        if self._control.size > 1:
            with self._control.guard("gathering experts", layer=layer):
                dist.all_gather_single(parts, local, group=self._groups[0])
        else:
            parts.copy_(local)
        order = [expert for rank in range(self._control.size) for expert in self._homes.order(layer, rank)]
        full = torch.empty_like(parts)
        full[torch.tensor(order, device=full.device)] = parts
        return full

    def _own_part(self, name: str, layer: int, full: torch.Tensor) -> torch.Tensor:
        order = self._homes.order(layer, self._control.rank)
        columns = self._model.get_parameter(name).shape[2]
        wanted = (len(order) * self._control.size, self._rows(name, layer), columns)
        if tuple(full.shape) != wanted:
            raise TransferError(f"{name} has shape {list(full.shape)}, expected {list(wanted)}", layer=layer)
        return self.own(name, full[torch.tensor(order, device=full.device)])


def _complete(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
