"""Cases with bad records, other engines and unusual orders of calls, run on every rank of a pool."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.distributed.verl_batches import EXPERTS
from tests.distributed.verl_engines import (
    batches_of,
    log_probs,
    loss_function,
    make_engine,
    prepare_process,
    state_of,
    update,
    worst,
)


@contextmanager
def logged(*names: str) -> Iterator[list[str]]:
    """Messages that these loggers write."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep()
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)


def corrupted(rank: int, world: int, *, directory: str, fault: str) -> dict[str, Any]:
    """A record that is wrong on the last rank, against veRL's engine, which routes live."""
    prepare_process()
    batches = batches_of(directory, rank)
    stock, engine = make_engine(directory, stock=True), make_engine(directory)
    with logged("foremoe.verl.engine") as messages:
        for each in (stock, engine):
            update(each, batches[0])
        if rank == world - 1:
            spoil(batches[1], fault)
        expected, got = update(stock, batches[1]), update(engine, batches[1])
    after = batches_of(directory, rank)[0]
    return {
        "gradient": worst(got["gradients"], expected["gradients"]),
        "parameter": worst(got["parameters"], expected["parameters"]),
        "messages": messages,
        "live_rows": got["metrics"]["foremoe/live_rows"],
        "next": update(engine, after)["metrics"]["foremoe/live_rows"],
    }


def spoil(batch: Any, fault: str) -> None:
    values = batch["routed_experts"].values()
    if fault == "out of range":
        values[2, 2, 1] = 77
    elif fault == "twice":
        values[2, 2] = values[2, 2, 0]
    else:
        short = [each[:-1] for each in batch["routed_experts"].unbind()]
        batch["routed_experts"] = torch.nested.as_nested_tensor(short, layout=torch.jagged)


def executed_otherwise(rank: int, world: int, *, directory: str) -> dict[str, Any]:
    """The record in the last rank's memory changes after it was planned: what runs is not what was counted."""
    prepare_process()
    batches = batches_of(directory, rank)
    stock, engine = make_engine(directory, stock=True), make_engine(directory)
    begin_pass = engine.begin_pass

    def begin_and_change(micro_batches: list[Any], observation: Any) -> None:
        begin_pass(micro_batches, observation)
        if rank == world - 1:
            ids_TK = engine._runtime._step.records[0].ids_LTK[1]
            chosen_K = ids_TK[(ids_TK[:, 0] >= 0).nonzero()[0, 0]]
            chosen_K[0] = next(expert for expert in range(EXPERTS) if expert not in chosen_K)

    with logged("foremoe.moe", "foremoe.verl.expert_engine") as messages:
        engine.begin_pass = begin_and_change
        log_probs(engine, batches[0])
        engine.begin_pass = begin_pass
        noticed = list(messages)
        # Routed live: as veRL's own engine does when it forces nothing.
        expected, got = update(stock, batches[1]), update(engine, batches[1])
    # Replayed again: as veRL's own engine does when it forces the record.
    stock.force = True
    expected_after, after = update(stock, batches[0]), update(engine, batches[0])
    return {
        "noticed": noticed,
        "messages": messages[len(noticed) :],
        "gradient": worst(got["gradients"], expected["gradients"]),
        "gradient after": worst(after["gradients"], expected_after["gradients"]),
        "as planned after": after["metrics"]["foremoe/as_planned"],
    }


def reference(rank: int, world: int, *, directory: str) -> dict[str, Any]:
    """A reference model with a record that is not its own: log-probs are those of live routing."""
    prepare_process()
    batch = batches_of(directory, rank)[0]
    routes = batch["routed_experts"].values()
    routes[(routes != 0).any(dim=(1, 2))] = torch.tensor([5, 6], dtype=routes.dtype)
    expected = log_probs(make_engine(directory, stock=True, forward_only=True), batch)
    engine = make_engine(directory, forward_only=True)
    got = log_probs(engine, batch)
    return {"difference": float((got - expected).abs().max()), "engine": type(engine).__name__}


def chosen_engine(
    rank: int, world: int, *, directory: str, expert_parallel: int | None = None, planner: str = "{}"
) -> tuple[str, bool]:
    """Which engine the registry builds, and whether it trains; or what it says."""
    prepare_process(expert_parallel=expert_parallel, planner=planner)
    try:
        engine = make_engine(directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    result = update(engine, batches_of(directory, rank)[0])
    return type(engine).__name__, result["norm"] > 0


def trace(rank: int, world: int, *, directory: str, trace_directory: str) -> list[dict[str, Any]]:
    """Passes of one step in the trace, and the balance that was reported."""
    import foremoe.verl.events as events

    os.environ["FOREMOE_TRACE_DIRECTORY"] = trace_directory
    prepare_process()
    import foremoe.verl.engine as module

    sent: list[dict[str, Any]] = []
    listening = events.EventSender(module.Settings.from_environment())
    listening.send = lambda kind, **fields: sent.append({"kind": kind, **fields})  # type: ignore[method-assign]
    events._sender = listening
    module._shared = module._Shared()
    try:
        engine, other = make_engine(directory), make_engine(directory, forward_only=True)
        batches = batches_of(directory, rank)
        log_probs(engine, batches[0])
        log_probs(other, batches[0])
        for batch in batches:
            update(engine, batch)
    finally:
        del os.environ["FOREMOE_TRACE_DIRECTORY"]
        events._sender = None
        module._shared = module._Shared()
    return sent


def accumulation(rank: int, world: int, *, directory: str, expert_parallel: int | None = None) -> tuple[float, str]:
    """Two passes before one optimizer step, against the stock engine."""
    prepare_process(expert_parallel=expert_parallel)
    gradients = []
    for stock in (True, False):
        engine = make_engine(directory, stock=stock)
        if stock:
            engine.force = True
        with engine.train_mode():
            engine.optimizer_zero_grad()
            for batch in batches_of(directory, rank):
                engine.forward_backward_batch(batch, loss_function(), forward_only=False)
            gradients.append({name: value.clone() for name, value in state_of(engine, gradients=True).items()})
    return worst(gradients[1], gradients[0])
