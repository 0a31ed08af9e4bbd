"""Cases that compare every tensor of our engine with veRL's own, run on every rank of a pool."""

from __future__ import annotations

import functools
from typing import Any

from tests.distributed.verl_engines import (
    batches_of,
    log_probs,
    make_engine,
    prepare_process,
    update,
    worst,
)


def train(engine: Any, directory: str, rank: int, *, packed: bool, dynamic: bool) -> list[dict[str, Any]]:
    """The log-probs of the first mini-batch, then updates with both."""
    settings = {"use_remove_padding": packed, "use_dynamic_bsz": dynamic, "max_token_len_per_gpu": 24}
    batches = batches_of(directory, rank, **settings)
    return [{"log_probs": log_probs(engine, batches[0])}, *(update(engine, batch) for batch in batches)]


@functools.cache
def stock_results(directory: str, rank: int, *, packed: bool, dynamic: bool, **settings: Any) -> list[dict[str, Any]]:
    """What veRL's own engine makes of the same, shared by all cases that differ in our settings only."""
    engine = make_engine(directory, stock=True, packed=packed, **settings)
    engine.force = True
    return train(engine, directory, rank, packed=packed, dynamic=dynamic)


def equality(
    rank: int,
    world: int,
    *,
    directory: str,
    expert_parallel: int | None = None,
    packed: bool = False,
    dynamic: bool = False,
    planner: str = "{}",
    tie: bool = False,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Both mini-batches against veRL's own engine, which forces the record in both."""
    prepare_process(expert_parallel=expert_parallel, planner=planner)
    engine = make_engine(directory, packed=packed, **settings)
    assert type(engine).__name__ == "ExpertParallelEngine"
    results = train(engine, directory, rank, packed=packed, dynamic=dynamic)
    wanted = stock_results(directory, rank, packed=packed, dynamic=dynamic, **settings)
    answer = []
    for expected, got in zip(wanted, results, strict=True):
        if "log_probs" in got:
            answer.append({"log_probs": float((got["log_probs"] - expected["log_probs"]).abs().max())})
            continue
        answer.append(
            {
                "loss": abs(got["loss"] - expected["loss"]),
                "gradient": worst(got["gradients"], expected["gradients"]),
                "norm": (got["norm"], expected["norm"]),
                "parameter": worst(got["parameters"], expected["parameters"]),
                "metrics": got["metrics"],
                "owned": got["owned"],
                "experts": sum(v.numel() for name, v in expected["parameters"].items() if ".experts." in name),
            }
        )
    return answer
