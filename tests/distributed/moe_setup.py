"""A small distributed model beside its dense reference, and how their numbers are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foremoe.errors import ForeMoEError
from foremoe.moe import ExpertParallelRuntime, expert_parallel
from foremoe.planner import PlannerConfig
from foremoe.topology import Topology
from tests.distributed.moe_cases import ep_group, twin_group
from tests.distributed.moe_models import Batch, DenseReference, make_batches, make_model
from tests.distributed.moe_scripted import plan_evenly

LENGTHS = [[11, 6], [4, 9]]


def build(
    rank: int,
    world: int,
    *,
    model_type: str = "qwen3_moe",
    experts: int = 8,
    ep: int | None = None,
    sharded: bool = False,
    dtype: torch.dtype = torch.float64,
    compute_dtype: torch.dtype | None = None,
    path: Any = None,
    **config: Any,
) -> tuple[ExpertParallelRuntime, DenseReference]:
    ep = ep or world
    model = make_model(model_type, experts=experts, dtype=dtype)
    reference = DenseReference(model)
    runtime = expert_parallel(
        model,
        group=ep_group(rank, world, ep),
        twins=twin_group(rank, world, ep) if sharded else None,
        compute_dtype=compute_dtype,
        topology=Topology.uniform(ranks=ep, ranks_per_node=ep),
        config=PlannerConfig(**{"redundant_slots": 1, **config}),
        path=path,
        plan=plan_evenly,
    )
    return runtime, reference


def batches_for(
    world: int, *, layers: int = 3, seed: int = 1, lengths: Any = None, experts: int = 8
) -> list[list[Batch]]:
    lengths = lengths or [(row * world)[:world] for row in LENGTHS]
    return make_batches(
        ranks=world, lengths_MS=lengths, layers=layers, experts=experts, top_k=2, dtype=torch.float64, skew=6.0,
        seed=seed,
    )  # fmt: skip


def caught(action: Callable[[], Any]) -> dict[str, Any]:
    """Kind, text and context of the error that `action` must raise."""
    try:
        action()
    except ForeMoEError as error:
        return {
            "kind": type(error).__name__, "text": str(error), "layer": error.layer, "expert": error.expert,
            "rank": error.rank,
        }  # fmt: skip
    raise AssertionError("no error was raised")


def run_reference(reference: DenseReference, batches: list[list[Batch]], *, live: bool = False) -> list[list[Any]]:
    out = []
    for row in batches:
        out.append([])
        for batch in row:
            loss, logits = reference.run(batch, live=live)
            loss.backward()
            out[-1].append(logits)
    return out


def close_to(got: torch.Tensor, expected: torch.Tensor, bound: float = 1e-12) -> None:
    error = float((got - expected).abs().max()) / float(expected.abs().max())
    assert error <= bound, error


class CountingDispatcher:
    """Rows that really arrive here, per exchange."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.received: list[int] = []

    def exchange(self, rows: Any, out: Any, *, send: Any, receive: Any, layer: int) -> Any:
        self.received.append(sum(receive))
        return self.inner.exchange(rows, out, send=send, receive=receive, layer=layer)
