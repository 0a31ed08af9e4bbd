"""Building a model that no rank ever holds whole, and reading from disk only what a rank keeps.

veRL builds the model with its weights in every process and lets rank 0 broadcast them. That costs the memory of the
whole model per rank, and it would give every rank the experts of rank 0. Here all ranks build it without storage; once
it is distributed, each reads its slices of the dense parameters and its own experts from the safetensors files.

Names on disk are not those of the model: transformers stores experts one by one and some layers under older names. Its
own conversion rules say which file entry belongs to which parameter, so the models it converts load here too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import verl.utils.model as verl_model
import verl.workers.engine.fsdp.transformer_impl as fsdp
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from foremoe.errors import LaunchError
from foremoe.verl.patching import replaced

__all__ = ["CheckpointFiles", "load_weights", "without_storage"]

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_INDEX = "model.safetensors.index.json"


@contextmanager
def without_storage() -> Iterator[None]:
    """While it is active, veRL's `_build_module` builds from the configuration, with parameters on the meta device."""
    auto_class = verl_model.get_hf_auto_model_class

    class FromConfig:
        def __init__(self, kind: Any) -> None:
            self._kind = kind

        def from_pretrained(
            self, pretrained_model_name_or_path: str, *, torch_dtype: torch.dtype, config: Any, trust_remote_code: bool
        ) -> nn.Module:
            return self._kind.from_config(  # type: ignore[no-any-return]
                config, dtype=torch_dtype, trust_remote_code=trust_remote_code
            )

    def stand_in(hf_config: Any) -> Any:
        return FromConfig(auto_class(hf_config=hf_config))

    # Parameters alone: buffers such as rotary frequencies are in no file and are computed at once.
    empty = {"get_init_weight_context_manager": lambda **_: init_empty_weights}
    with replaced(verl_model, get_hf_auto_model_class=stand_in), replaced(fsdp, **empty):
        yield


@dataclass(frozen=True)
class _Part:
    """One file entry: expert `expert` of a packed parameter, its `half` of `halves`; or a whole parameter."""

    key: str
    file: Path
    expert: int | None = None
    half: int = 0
    halves: int = 1


@dataclass
class CheckpointFiles:
    """Which file entries make up which parameter of a model."""

    parts: dict[str, list[_Part]] = field(default_factory=dict)
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: Path, model: nn.Module) -> CheckpointFiles:
        """Raises LaunchError for a directory without safetensors, or with a layout that needs another conversion."""
        transforms = get_model_conversion_mapping(model)
        renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        state = dict(model.state_dict(keep_vars=True))
        files = cls()
        for key, file in _entries(directory).items():
            name, pattern = rename_source_key(
                key, renamings, converters, getattr(model, "base_model_prefix", ""), state
            )
            files.parts.setdefault(name, []).append(_part(key, file, name, pattern, converters))
        return files

    def slice_of(self, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A rectangle of a parameter that is stored whole."""
        part = self._parts(name)[0]
        entry = self._file(part.file).get_slice(part.key)
        if not shape:
            return self._file(part.file).get_tensor(part.key)  # type: ignore[no-any-return]
        return entry[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))]  # type: ignore[no-any-return]

    def experts_of(self, name: str, experts: list[int]) -> torch.Tensor:
        """Some experts of a packed parameter, in this order."""
        parts = self._parts(name)
        if parts[0].expert is None:
            entry = self._file(parts[0].file).get_slice(parts[0].key)
            return torch.stack([entry[expert] for expert in experts])
        by_place = {(part.expert, part.half): part for part in parts}
        stacked = []
        for expert in experts:
            halves = [by_place.get((expert, half)) for half in range(parts[0].halves)]
            if None in halves:
                raise LaunchError(f"the model files lack a part of {name}", expert=expert)
            stacked.append(torch.cat([self._file(part.file).get_tensor(part.key) for part in halves if part]))
        return torch.stack(stacked)

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()

    def _parts(self, name: str) -> list[_Part]:
        if name not in self.parts:
            raise LaunchError(f"the model files have nothing for {name}")
        return self.parts[name]

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


def _entries(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    if index.exists():
        weight_map: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
        return {key: directory / file for key, file in weight_map.items()}
    entries: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            entries.update(dict.fromkeys(opened.keys(), path))
    if not entries:
        raise LaunchError(
            f"{directory} has no safetensors files; save the model once with transformers' save_pretrained"
        )
    return entries


def _part(key: str, file: Path, name: str, pattern: str | None, converters: list[Any]) -> _Part:
    if pattern is None:
        return _Part(key, file)
    sources = next(list(each.source_patterns) for each in converters if pattern in each.source_patterns)
    number = _EXPERT.search(key)
    if number is None:
        raise LaunchError(f"the entry {key} of the model files needs a conversion to {name} that is not known here")
    return _Part(key, file, expert=int(number[1]), half=sources.index(pattern), halves=len(sources))


def load_weights(
    model: nn.Module,
    files: CheckpointFiles,
    *,
    experts_of: Callable[[str], list[int] | None],
    own: Callable[[str, torch.Tensor], torch.Tensor],
    dense_device: torch.device,
    device: torch.device,
) -> None:
    """Give every parameter and buffer of a distributed model its storage and its values from disk.

    `experts_of`: for a packed expert parameter, the experts that this rank keeps, in order; None for any other.
    `own`: what of them it keeps.
    `dense_device`: where sharded parameters lie, the host if FSDP brings them; all else lies on `device`.
    """
    tied = _tied_names(model)
    loaded: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in tied:
            continue
        experts = experts_of(name)
        if experts is not None:
            values = own(name, files.experts_of(name, experts))
        elif isinstance(value, DTensor):
            shape, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            values = files.slice_of(name, tuple(offsets), tuple(shape))
        else:
            values = files.slice_of(name, (0,) * value.ndim, tuple(value.shape))
        place = dense_device if isinstance(value, DTensor) else device
        # A copy always: what safetensors hands out is a view of the mapped file, whose storage cannot be saved again.
        values = values.to(device=place, dtype=value.dtype, copy=True, memory_format=torch.contiguous_format)
        if isinstance(value, DTensor):
            values = DTensor.from_local(
                values, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        loaded[name] = values
    # A name that shares its parameter gets the same values: FSDP keeps one shard for both.
    for name, twin in tied.items():
        loaded[name] = loaded[twin]
    model.load_state_dict(loaded, assign=True)
    for buffer in model.buffers():
        buffer.data = buffer.to(device)


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Names whose parameter has an earlier name, and that name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return tied
