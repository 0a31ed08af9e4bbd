"""Turning a model into a distributed one: what it is, whether all ranks agree, and the conversion itself."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from foremoe import __version__
from foremoe.errors import PlannerError
from foremoe.moe.adapters import ModelAdapter, MoESite, adapter_for
from foremoe.moe.layer import LayerCall, RoutedExperts
from foremoe.moe.shards import ExpertShards
from foremoe.planner import BasePlacement, PlannerConfig
from foremoe.topology import Topology
from foremoe.transfer import ControlPlane

__all__ = [
    "ModelFacts",
    "agreed_topology",
    "check_equal_moves",
    "check_equal_settings",
    "check_equal_twins",
    "convert",
    "inspect_model",
    "with_model_shape",
]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the runtime needs to know of a model."""

    adapter: ModelAdapter
    sites: tuple[MoESite, ...]
    decoder_layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    """Intermediate width of one expert."""
    dtype: torch.dtype


def inspect_model(model: nn.Module) -> ModelFacts:
    """Raises PlannerError for a model without MoE layers, of an unknown layout or with layers of different sizes."""
    adapter = adapter_for(model)
    sites = tuple(adapter.sites(model))
    for layer, site in enumerate(sites):
        if isinstance(site.experts, RoutedExperts):
            raise PlannerError(f"{site.name} is distributed already", layer=layer)
        if site.experts.get_parameter("down_proj").shape != sites[0].experts.get_parameter("down_proj").shape:
            raise PlannerError("MoE layers of different sizes are not supported", layer=layer)
    down = sites[0].experts.get_parameter("down_proj")
    decoder_layers = int(getattr(getattr(model, "config", None), "num_hidden_layers", len(sites)))
    return ModelFacts(
        adapter=adapter,
        sites=sites,
        decoder_layers=decoder_layers,
        experts=int(down.shape[0]),
        top_k=adapter.top_k(sites[0]),
        hidden=int(down.shape[1]),
        width=int(down.shape[2]),
        dtype=down.dtype,
    )


def with_model_shape(config: PlannerConfig, facts: ModelFacts) -> PlannerConfig:
    """The same settings with the cost model told the sizes of this model."""
    shape = config.cost.model.model_copy(
        update={
            "hidden": facts.hidden,
            "expert_width": facts.width,
            "top_k": facts.top_k,
            "moe_layers": len(facts.sites),
        }
    )
    return config.model_copy(update={"cost": config.cost.model_copy(update={"model": shape})})


def agreed_topology(control: ControlPlane, given: Topology | None) -> Topology:
    """`given`, or one node per host name of the ranks. Raises PlannerError if it has another number of ranks."""
    if given is None:
        hosts = control.gather_objects(socket.gethostname(), what="finding nodes")
        return Topology.of_places([(host, host) for host in hosts])

    def check() -> Topology:
        if given.size != control.size:
            raise PlannerError(f"the topology has {given.size} ranks, the group {control.size}")
        return given

    return control.agree(check, what="checking the topology")


def check_equal_settings(
    control: ControlPlane, *, config: PlannerConfig, topology: Topology, base: BasePlacement, facts: ModelFacts
) -> None:
    """Raises PlannerError on every rank, naming what differs on which rank; also for a base that does not fit."""
    settings = {"planner settings": config.model_dump_json(), "topology": topology.model_dump_json()}
    _compare(control, {**_common_facts(base, facts), **settings}, among="all ranks")
    if base.experts != facts.experts or base.ranks != control.size:
        raise PlannerError(
            f"the base placement has {base.experts} experts on {base.ranks} ranks, the model {facts.experts} on "
            f"{control.size}"
        )


def check_equal_twins(twins: ControlPlane, *, group: ControlPlane, base: BasePlacement, facts: ModelFacts) -> None:
    """Raises PlannerError, on every twin, if they do not hold the same experts in the same places."""
    place = {"place in its expert-parallel group": f"{group.rank} of {group.size}"}
    _compare(twins, {**_common_facts(base, facts), **place}, among="ranks that share experts out")


def check_equal_moves(twins: ControlPlane, wanted: Sequence[BasePlacement]) -> None:
    """Raises PlannerError, on every twin, if `wanted` homes (one per layer) differ between EP groups."""
    homes = [base.home_E.tobytes() for base in wanted]
    if any(theirs != homes for theirs in twins.gather_objects(homes, what="comparing homes")):
        raise PlannerError("homes must change alike in all expert-parallel groups")


def _common_facts(base: BasePlacement, facts: ModelFacts) -> dict[str, str]:
    layout = (len(facts.sites), facts.experts, facts.top_k, facts.hidden, facts.width, str(facts.dtype))
    return {
        "model": repr(layout),
        "version of foremoe": __version__,
        "base placement": base.home_E.tobytes().hex(),
    }


def _compare(control: ControlPlane, mine: dict[str, str], *, among: str) -> None:
    hashed = {name: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for name, text in mine.items()}
    everyone = control.gather_objects(hashed, what="comparing settings")
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise PlannerError(f"its {name} differs from rank 0's; {among} need the same", rank=rank)


def convert(
    facts: ModelFacts,
    *,
    home: npt.NDArray[np.bool_],
    choose: Callable[[int, torch.Tensor], torch.Tensor],
    prepare: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], LayerCall],
    shards: ExpertShards | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[list[RoutedExperts], list[Callable[[], None]]]:
    """Replace the experts of every site and hook its router; the new modules and what undoes the hooks.

    `home`: which experts stay here, bool [E]. `shards`: what divides them further.
    """
    kept = np.flatnonzero(home).tolist()
    layers, undo = [], []
    for index, site in enumerate(facts.sites):
        layer = RoutedExperts(
            site.experts, home=kept, prepare=partial(prepare, index), shards=shards, compute_dtype=compute_dtype
        )
        layer.train(site.experts.training)
        site.block.register_module("experts", layer)
        layers.append(layer)
        undo.append(facts.adapter.install(site, partial(choose, index)))
    if shards is not None:
        shards.watch(layers)
    return layers, undo
