"""Experts in a checkpoint: stored one by one under their names, so that nothing of the run's placement is in it.

veRL writes one file per rank with whatever that rank holds, which ties a checkpoint to the EP size and the homes it was
written under. Here the per-rank files keep the dense parameters, and each home writes its experts, with their optimizer
state, to `experts/`, one entry per expert. A rank that loads takes the experts it is home of now, whoever wrote them:
another EP size, placement or strategy changes nothing. The number of ranks must stay, because of the dense files.

Both directions hang on torch's public state-dict hooks, so veRL's own checkpoint code runs unchanged in between. Twins
hold shares of the same experts: each writes some of these experts, whole, so all ranks write at once and no entry
tells how many groups there were. The directory must be one that all ranks can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from foremoe.errors import TransferError
from foremoe.verl.groups import GroupInfo

__all__ = ["ExpertFiles", "dense_only", "with_experts"]

DIRECTORY = "experts"
_VERSION = "1"

Convert = Callable[[str, torch.Tensor], torch.Tensor]
"""(parameter, tensor) -> tensor: between what a rank keeps of its home experts and whole ones."""


class ExpertFiles:
    """Entries `<parameter>/<expert>/<what>`, where what is `weight` or the name of an optimizer state."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / DIRECTORY
        self._file_of: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}

    def write(
        self,
        named: Mapping[str, nn.Parameter],
        homes: Mapping[str, list[int]],
        optimizer: torch.optim.Optimizer | None,
        *,
        whole: Convert,
        info: GroupInfo,
    ) -> None:
        """Write what falls to this rank of its home experts; its file is complete or not there. Collective."""
        entries: dict[str, torch.Tensor] = {}
        for name, experts in homes.items():
            parameter = named[name]
            for what, tensor in _tensors(parameter, optimizer).items():
                tensor = whole(name, tensor.detach()) if tensor.ndim else tensor.detach()
                for place in range(info.index, len(experts), info.groups):
                    # Scalars, such as Adam's step, belong to the whole parameter; every expert carries a copy.
                    value = tensor[place] if tensor.ndim else tensor
                    entries[f"{name}/{experts[place]}/{what}"] = value.to("cpu", copy=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        part = info.index * info.size + info.rank_in_group
        path = self._directory / f"experts-{part:05d}-of-{info.groups * info.size:05d}.safetensors"
        unfinished = path.with_suffix(".part")
        save_file(entries, unfinished, metadata={"format": "foremoe-experts", "version": _VERSION})
        unfinished.replace(path)

    def packed(self, name: str, experts: list[int], what: str) -> torch.Tensor:
        """Some experts of a parameter or of its state, stacked in this order; a scalar stays one.

        Raises TransferError, naming the expert, if it is not in the files.
        """
        tensors = [self._entry(name, expert, what) for expert in experts]
        return tensors[0] if tensors[0].ndim == 0 else torch.stack(tensors)

    def states(self, name: str, expert: int) -> list[str]:
        """Names of the optimizer states stored for one expert."""
        prefix = f"{name}/{expert}/"
        found = [key.removeprefix(prefix) for key in self._index() if key.startswith(prefix)]
        return sorted(what for what in found if what != "weight")

    def _entry(self, name: str, expert: int, what: str) -> torch.Tensor:
        key = f"{name}/{expert}/{what}"
        path = self._index().get(key)
        if path is None:
            raise TransferError(
                f"the checkpoint in {self._directory} has no {what} of {name}; was it written by another engine, or "
                "are files of other ranks out of reach?",
                expert=expert,
            )
        return self._open[path].get_tensor(key)  # type: ignore[no-any-return]

    def _index(self) -> dict[str, Path]:
        if not self._file_of:
            for path in sorted(self._directory.glob("*.safetensors")):
                try:
                    self._open[path] = safe_open(path, framework="pt")
                except SafetensorError as error:
                    raise TransferError(f"{path} is damaged: {error}") from error
                self._file_of.update(dict.fromkeys(self._open[path].keys(), path))
        return self._file_of


def _tensors(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return {"weight": parameter, **{key: value for key, value in state.items() if isinstance(value, torch.Tensor)}}


@contextmanager
def dense_only(
    model: nn.Module, homes: Mapping[str, list[int]], optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """While it is active, `state_dict()` of model and optimizer leave the experts `homes` out."""

    def drop(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: object) -> None:
        for name in homes:
            state.pop(name, None)

    with ExitStack() as stack:
        stack.callback(model.register_state_dict_post_hook(drop).remove)  # type: ignore[no-untyped-call]
        if optimizer is not None:
            numbers = set(_numbers(model, homes, optimizer))

            def drop_states(_optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
                kept = {number: value for number, value in state["state"].items() if number not in numbers}
                return {**state, "state": kept}

            stack.callback(optimizer.register_state_dict_post_hook(drop_states).remove)
        yield


@contextmanager
def with_experts(
    model: nn.Module,
    homes: Mapping[str, list[int]],
    optimizer: torch.optim.Optimizer | None,
    files: ExpertFiles,
    *,
    own: Convert,
) -> Iterator[None]:
    """While it is active, `load_state_dict()` of model and optimizer take the experts `homes` from `files`.

    `own` gives what this rank keeps of them.
    """

    def kept(name: str, experts: list[int], what: str) -> torch.Tensor:
        packed = files.packed(name, experts, what)
        return own(name, packed) if packed.ndim else packed

    def add(_module: nn.Module, state: dict[str, Any], *_: object) -> None:
        for name, experts in homes.items():
            state[name] = kept(name, experts, "weight")

    with ExitStack() as stack:
        stack.callback(model.register_load_state_dict_pre_hook(add).remove)  # type: ignore[no-untyped-call]
        if optimizer is not None:
            numbers = _numbers(model, homes, optimizer)

            def add_states(_optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
                states = dict(state["state"])
                for number, name in numbers.items():
                    experts = homes[name]
                    kinds = files.states(name, experts[0]) if experts else []
                    if kinds:
                        states[number] = {kind: kept(name, experts, kind) for kind in kinds}
                return {**state, "state": states}

            stack.callback(optimizer.register_load_state_dict_pre_hook(add_states).remove)
        yield


def _numbers(model: nn.Module, homes: Mapping[str, list[int]], optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Number of each expert parameter in the optimizer's state dict, and its name."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters() if name in homes}
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {number: name_of[id(each)] for number, each in enumerate(held) if id(each) in name_of}
