"""Records, settings, models and peers that are wrong, as cases that every rank of a pool runs (see `launch`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn

from foremoe.moe import expert_parallel
from foremoe.planner import BasePlacement, PlannerConfig
from foremoe.topology import Topology
from tests.distributed.moe_cases import run_pass, shuffled_bases, summary
from tests.distributed.moe_models import loss_of, make_model, worst_error
from tests.distributed.moe_scripted import plan_evenly
from tests.distributed.moe_setup import batches_for, build, caught, close_to, run_reference


def bad_records(rank: int, world: int) -> dict[str, Any]:
    """Every refused record leaves the model live and usable."""
    runtime, reference = build(rank, world)
    good = [row[rank].routing_TLK for row in batches_for(world)]

    def spoiled(change: Callable[[list[torch.Tensor]], Any], *, on: int = 1) -> dict[str, Any]:
        records = [record.clone() for record in good]
        if rank == on:
            changed = change(records)
            records = records if changed is None else changed
        return caught(lambda: runtime.begin_step(records))

    def out_of_range(records: list[torch.Tensor]) -> None:
        records[1][2, 1, 0] = 8

    def below(records: list[torch.Tensor]) -> None:
        records[0][0, 2, 1] = -3

    found = {
        "out of range": spoiled(out_of_range),
        "below": spoiled(below),
        "more layers": spoiled(lambda records: [torch.cat([r, r], dim=1) for r in records]),
        "fewer layers": spoiled(lambda records: [r[:, :2] for r in records]),
        "other top-k": spoiled(lambda records: [r[..., :1] for r in records]),
        "floats": spoiled(lambda records: [r.float() for r in records]),
        "not a tensor": spoiled(lambda records: [r.tolist() for r in records]),
        "two dimensions": spoiled(lambda records: [r[0] for r in records]),
        "no micro-step": spoiled(lambda records: []),
        "one more micro-step": spoiled(lambda records: [*records, records[0]], on=0),
    }
    batches = batches_for(world)
    with torch.no_grad():
        close_to(loss_of(runtime.model, batches[0][rank])[1], reference.run(batches[0][rank], live=True)[1])
    report, _ = run_pass(runtime, batches, rank)
    assert report.as_planned
    runtime.close()
    return found


def record_lengths(rank: int, world: int, cut: int) -> dict[str, Any]:
    """Records longer (cut < 0) or shorter than the tokens of one rank: right numbers, one common way on all ranks."""
    runtime, reference = build(rank, world, dynamic_slots=1)
    batches = batches_for(world)
    changed = batches[0][1]
    if cut > 0:
        changed.routing_TLK = (
            changed.routing_TLK[:-cut] if cut < changed.routing_TLK.shape[0] else changed.routing_TLK[:0]
        )
    else:
        tail = changed.routing_TLK[:1].expand(-cut, -1, -1)
        changed.routing_TLK = torch.cat([changed.routing_TLK, tail])
    expected = run_reference(reference, batches)
    report, logits = run_pass(runtime, batches, rank)
    for m in range(len(batches)):
        close_to(logits[m], expected[m][rank])
    error, name = worst_error(runtime.full_gradients(), reference.gradients())
    assert error <= 1e-12, name
    following, _ = run_pass(runtime, batches_for(world, seed=2), rank)
    assert following.as_planned
    runtime.close()
    return {"this": summary(report), "next": summary(following)}


def repeated_ids(rank: int, world: int) -> dict[str, Any]:
    runtime, reference = build(rank, world)
    batches = batches_for(world)
    batches[0][0].routing_TLK[3:5] = 0  # how engines fill rows they never computed
    expected_batches = batches_for(world)
    expected_batches[0][0].routing_TLK[3:5] = -1
    expected = run_reference(reference, expected_batches)
    report, logits = run_pass(runtime, batches, rank)
    close_to(logits[0], expected[0][rank])
    runtime.close()
    return summary(report)


def nan_weights(rank: int, world: int) -> dict[str, Any]:
    runtime, _ = build(rank, world)
    with torch.no_grad():
        runtime.model.model.layers[1].mlp.gate.weight.fill_(float("nan"))
    report, logits = run_pass(runtime, batches_for(world), rank)
    assert logits[0].isnan().any()
    runtime.close()
    return summary(report)


def corrupted_memory(rank: int, world: int) -> list[dict[str, Any]]:
    """Ids that change after planning are noticed; the next step routes live on all ranks, the one after replays."""
    runtime, reference = build(rank, world)
    batches = batches_for(world)
    runtime.begin_step([row[rank].routing_TLK for row in batches])
    if rank == 1:
        assert runtime._step is not None
        ids_TK = runtime._step.records[0].ids_LTK[2]
        ids_TK[0] = torch.tensor([e for e in range(8) if e not in ids_TK[0]][:2])
    for m, row in enumerate(batches):
        with runtime.micro_step(m):
            loss_of(runtime.model, row[rank])[0].backward()
    reports = [summary(runtime.end_step())]
    for _ in range(2):
        report, logits = run_pass(runtime, batches, rank)
        reports.append(summary(report))
        live = report.fell_back
        close_to(logits[0], reference.run(batches[0][rank], live=live)[1])
    runtime.close()
    return reports


def settings_differ(rank: int, world: int) -> dict[str, Any]:
    different = {
        "config": lambda: build(rank, world, seed=rank),
        "topology": lambda: expert_parallel(
            make_model("qwen3_moe"), topology=Topology.uniform(ranks=world, ranks_per_node=1 + rank)
        ),
        "model": lambda: expert_parallel(make_model("qwen3_moe", experts=8 * (1 + rank))),
        "base": lambda: expert_parallel(
            make_model("qwen3_moe"),
            base=BasePlacement(home_E=np.roll(np.repeat(np.arange(world), 8 // world), rank), ranks=world),
        ),
    }
    return {name: caught(action) for name, action in different.items()}


def unsuitable(rank: int, world: int) -> dict[str, Any]:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    dense = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, num_key_value_heads=2, **small))
    loop = make_model("qwen3_moe")
    loop.model.layers[1].mlp.experts.register_parameter("bias", nn.Parameter(torch.zeros(8)))
    no_moe = make_model("qwen3_moe", mlp_only_layers=[0, 1, 2])
    twice = make_model("qwen3_moe")
    expert_parallel(twice).close()
    return {
        "dense": caught(lambda: expert_parallel(dense)),
        "no config": caught(lambda: expert_parallel(nn.Linear(2, 2))),
        "layout": caught(lambda: expert_parallel(loop)),
        "no MoE layer": caught(lambda: expert_parallel(no_moe)),
        "does not divide": caught(lambda: expert_parallel(make_model("qwen3_moe", experts=7))),
        "topology size": caught(
            lambda: expert_parallel(
                make_model("qwen3_moe"), topology=Topology.uniform(ranks=world + 1, ranks_per_node=world + 1)
            )
        ),
        "base size": caught(
            lambda: expert_parallel(
                make_model("qwen3_moe"), base=BasePlacement.contiguous(experts=4 * world, ranks=2 * world)
            )
        ),
        "twice": caught(lambda: expert_parallel(twice)),
        "other layers moved": caught(lambda: _moved_wrongly(rank, world)),
    }


def _moved_wrongly(rank: int, world: int) -> None:
    runtime, _ = build(rank, world)
    runtime.move_homes(shuffled_bases(2, 8, world, seed=1))


def peer_lost(rank: int, world: int, *, how: str, victim: int, backward: bool) -> dict[str, Any]:
    """One rank ends or sleeps in the middle of a micro-step."""
    batches = batches_for(world, lengths=[[5] * world] * 2, experts=6)
    healthy, _ = build(rank, world, dynamic_slots=1, experts=6)
    run_pass(healthy, batches, rank)
    healthy.close()
    runtime = expert_parallel(
        make_model("qwen3_moe", experts=6),
        group=dist.new_group(timeout=timedelta(seconds=8)),
        config=PlannerConfig(redundant_slots=1, dynamic_slots=1),
        plan=plan_evenly,
    )
    runtime.begin_step([row[rank].routing_TLK for row in batches])

    def vanish(*_arguments: Any) -> None:
        if how == "dies":
            os._exit(9)
        time.sleep(60)

    if rank == victim:
        block = runtime.model.model.layers[1]
        if backward:
            block.register_full_backward_pre_hook(vanish)
        else:
            block.register_forward_pre_hook(vanish)
    started = time.monotonic()

    def step() -> None:
        with runtime.micro_step(0):
            loss_of(runtime.model, batches[0][rank])[0].backward()

    found = caught(step)
    seconds = time.monotonic() - started
    return {**found, "seconds": seconds, "abandoning": caught(runtime.abandon_step)}
