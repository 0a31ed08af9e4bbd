"""What the runtime promises, as cases that every rank of a pool runs (see `launch`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.moe_cases import reduce_dense, run_pass, summary
from tests.distributed.moe_dense import ADAM
from tests.distributed.moe_models import loss_of, make_batches, make_model, worst_error
from tests.distributed.moe_setup import LENGTHS, CountingDispatcher, batches_for, build, caught, close_to, run_reference


def parameters(rank: int, world: int) -> None:
    original = make_model("qwen3_moe")
    names = {name: tuple(value.shape) for name, value in original.state_dict().items()}
    state = {name: value.clone() for name, value in original.state_dict().items()}
    runtime, _ = build(rank, world)
    local = {name: tuple(value.shape) for name, value in runtime.model.state_dict().items()}
    assert list(local) == list(names)
    for name, shape in names.items():
        wanted = (shape[0] // world, *shape[1:]) if ".experts." in name else shape
        assert local[name] == wanted, name
    experts, dense = runtime.expert_parameters(), runtime.dense_parameters()
    assert len(experts) == 6
    assert len(experts) + len(dense) == len(list(runtime.model.parameters()))
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in experts)
    full = runtime.full_state_dict()
    assert list(full) == list(names)
    assert all(torch.equal(full[name], state[name]) for name in names)
    streamed = dict(runtime.named_full_tensors())
    assert all(torch.equal(streamed[name], state[name]) for name in names)
    runtime.close()


def live_without_a_step(rank: int, world: int, sharded: bool = False) -> None:
    runtime, reference = build(rank, world, ep=2, sharded=sharded)
    batches = batches_for(world)
    expected = run_reference(reference, batches[:1], live=True)
    loss, logits = loss_of(runtime.model, batches[0][rank])
    loss.backward()
    close_to(logits, expected[0][rank])
    error, name = worst_error(runtime.full_gradients(), reference.gradients())
    assert error <= 1e-12, name
    # An optimizer of which the runtime knows nothing: the next forward still uses the new weights.
    reduce_dense(runtime, dist.group.WORLD)
    for model in (runtime.model, reference.model):
        torch.optim.SGD(model.parameters(), lr=0.05).step()
    with torch.no_grad():
        logits = loss_of(runtime.model, batches[0][rank])[1]
        close_to(logits, reference.run(batches[0][rank], live=True)[1], 1e-10)
    runtime.close()


def passes(rank: int, world: int, dynamic: int = 0) -> list[dict[str, Any]]:
    """Forward-only passes, repeated micro-steps, live routing afterwards, an empty micro-step."""
    runtime, reference = build(rank, world, dynamic_slots=dynamic)
    batches = batches_for(world, lengths=[[11, 6], [0, 0], [4, 9]])
    expected = run_reference(reference, batches)
    counter = CountingDispatcher(runtime.dispatcher)
    runtime.dispatcher = counter
    report, logits = run_pass(runtime, batches, rank, backward=False)
    runtime.dispatcher = counter.inner
    # What the report says was executed is what came in, layer by layer; every second exchange is the way back.
    reported = (report.executed_MLR + report.live_MLR)[:, :, rank].ravel().tolist()
    assert counter.received[::2] == reported
    for m in (0, 2):
        close_to(logits[m], expected[m][rank])
    assert all(parameter.grad is None for parameter in runtime.model.parameters())
    assert (report.imbalance_ML[1] == 1.0).all()
    assert report.as_planned
    reports = [summary(report)]
    # Old log-probs and the update in one step: every micro-step is visited twice, in another order.
    runtime.begin_step([row[rank].routing_TLK for row in batches])
    for m in (2, 0, 1):
        with runtime.micro_step(m), torch.no_grad():
            close_to(loss_of(runtime.model, batches[m][rank])[1], expected[m][rank])
    for m in (0, 1, 2):
        with runtime.micro_step(m):
            loss_of(runtime.model, batches[m][rank])[0].backward()
    again = runtime.end_step()
    assert again.as_planned
    assert (again.executed_MLR == report.executed_MLR).all()
    error, name = worst_error(runtime.full_gradients(), reference.gradients())
    assert error <= 1e-12, name
    assert all(parameter.grad is not None for parameter in runtime.expert_parameters())
    reports.append(summary(again))
    # The record must not linger.
    with torch.no_grad():
        live = loss_of(runtime.model, batches[0][rank])[1]
        close_to(live, reference.run(batches[0][rank], live=True)[1])
    runtime.close()
    return [{key: value for key, value in each.items() if key not in ("hidden", "exposed")} for each in reports]


def order_of_calls(rank: int, world: int) -> None:
    runtime, _ = build(rank, world)
    record = [batches_for(world)[0][rank].routing_TLK]
    assert "begin_step first" in caught(lambda: runtime.micro_step(0).__enter__())["text"]
    assert "without begin_step" in caught(runtime.end_step)["text"]
    assert "without begin_step" in caught(runtime.abandon_step)["text"]
    runtime.begin_step(record)
    assert "abandon_step on every rank" in caught(lambda: runtime.begin_step(record))["text"]
    assert "micro-step 1 of 1" in caught(lambda: runtime.micro_step(1).__enter__())["text"]
    with runtime.micro_step(0):
        assert "inside" in caught(lambda: runtime.micro_step(0).__enter__())["text"]
    assert "between steps" in caught(lambda: runtime.move_homes(runtime.bases[0]))["text"]
    runtime.end_step()
    runtime.close()


def two_models(rank: int, world: int) -> None:
    """A policy that replays and a reference that only forecasts, open at the same time."""
    policy, policy_dense = build(rank, world)
    other, other_dense = build(rank, world)
    batches = batches_for(world)
    policy.begin_step([row[rank].routing_TLK for row in batches])
    other.begin_step([row[rank].routing_TLK for row in batches], forecast=True)
    for m, row in enumerate(batches):
        with policy.micro_step(m), other.micro_step(m), torch.no_grad():
            replayed = loss_of(policy.model, row[rank])[1]
            live = loss_of(other.model, row[rank])[1]
        close_to(replayed, policy_dense.run(row[rank])[1])
        close_to(live, other_dense.run(row[rank], live=True)[1])
    assert policy.end_step().as_planned
    report = other.end_step()
    assert report.step_copies > 0
    assert report.planned_MLR.sum() == 0
    assert report.live_MLR.sum() == 3 * 2 * sum(sum(lengths) for lengths in LENGTHS)
    policy.close()
    other.close()


def twice_the_same(rank: int, world: int, sharded: bool = False) -> None:
    runs = []
    for _ in range(2):
        runtime, _ = build(rank, world, ep=2, sharded=sharded, dynamic_slots=1)
        report, logits = run_pass(runtime, batches_for(world), rank)
        assert report.copies > 0
        gradients = {n: p.grad.clone() for n, p in runtime.model.named_parameters() if p.grad is not None}
        if sharded:
            reduce_dense(runtime, dist.group.WORLD)
            gradients["norm"] = runtime.clip_gradients(0.1)
            torch.optim.AdamW(runtime.model.parameters(), foreach=False, **ADAM).step()
            logits += run_pass(runtime, batches_for(world, seed=2), rank, backward=False)[1]
        runs.append((logits, gradients))
        runtime.close()
    (first, first_gradients), (second, second_gradients) = runs
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(first_gradients[name], second_gradients[name]) for name in first_gradients)


def replicas_follow_the_optimizer(rank: int, world: int) -> None:
    """Two passes with equal routing and an optimizer step between: replicas must be pushed again."""
    runtime, reference = build(rank, world)
    optimizer = torch.optim.SGD(runtime.model.parameters(), lr=0.05)
    dense_optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.05)
    batches = batches_for(world)
    for _ in range(2):
        optimizer.zero_grad()
        dense_optimizer.zero_grad()
        report, logits = run_pass(runtime, batches, rank)
        assert report.step_copies > 0
        expected = run_reference(reference, batches)
        for m in range(len(batches)):
            close_to(logits[m], expected[m][rank], 1e-10)
        reduce_dense(runtime, dist.group.WORLD)
        optimizer.step()
        dense_optimizer.step()
    runtime.close()


def memory(rank: int, world: int) -> None:
    """Replicas hold their slots and fp32-or-wider gradients, nothing else."""
    runtime, _ = build(rank, world, redundant_slots=1)
    report, _ = run_pass(runtime, batches_for(world), rank, backward=False)
    copies = report.step_copies
    expert = sum(parameter[0].nbytes for parameter in runtime.expert_parameters()[:2])
    held = torch.tensor([runtime.replica_bytes])
    dist.all_reduce(held)
    assert int(held) == copies * expert
    run_pass(runtime, batches_for(world), rank)
    held = torch.tensor([runtime.replica_bytes])
    dist.all_reduce(held)
    assert int(held) == 2 * copies * expert
    runtime.close()


def block_without_rows(rank: int, world: int) -> None:
    """The MoE block itself takes zero rows on one rank and keeps the graph there."""
    runtime, _ = build(rank, world)
    tokens = 0 if rank == 0 else 5
    records = [torch.stack([torch.randperm(8)[:2] for _ in range(15)]).view(5, 3, 2)[:tokens]]
    runtime.begin_step(records)
    hidden = torch.randn(1, tokens, 32, dtype=torch.float64, requires_grad=True)
    with runtime.micro_step(0):
        out = runtime.model.model.layers[0].mlp(hidden)
        assert out.shape == (1, tokens, 32)
        out.sum().backward()
    runtime.end_step()
    assert hidden.grad is not None
    # No gradient came to the layers behind the block; optimizers would skip them on the ranks that hold them.
    assert all(parameter.grad is not None for parameter in runtime.expert_parameters())
    runtime.close()


def mixed_precision(rank: int, world: int) -> None:
    """fp32 shares, bf16 to compute with: gathered once per step, gradients summed in fp32."""
    runtime, reference = build(rank, world, ep=2, sharded=True, dtype=torch.float32, compute_dtype=torch.bfloat16)
    batches = make_batches(
        ranks=world, lengths_MS=[[11, 6, 3, 8], [4, 9, 7, 5]], layers=3, experts=8, top_k=2, dtype=torch.float32
    )
    gathered = []
    original = dist.all_gather_single

    def counted(out: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
        gathered.append(out.dtype)
        return original(out, part, **options)

    dist.all_gather_single = counted
    try:
        for _ in range(2):
            run_pass(runtime, batches, rank, backward=False)
        run_pass(runtime, batches, rank)
    finally:
        dist.all_gather_single = original
    # Two matrices of three layers, once for three passes.
    assert gathered.count(torch.bfloat16) == 6
    run_reference(reference, batches)
    for parameter in runtime.expert_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert not torch.equal(parameter.grad, parameter.grad.bfloat16().float())
    error, name = worst_error(runtime.full_gradients(), reference.gradients())
    assert error <= 6e-2, name
    assert runtime.full_state_dict()["model.layers.0.mlp.experts.down_proj"].dtype == torch.float32
    runtime.close()


def fsdp(rank: int, world: int) -> None:
    """Dense parameters under FSDP2, experts outside of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    runtime, reference = build(rank, world)
    mesh = init_device_mesh("cpu", (world,))
    ignored = set(runtime.expert_parameters())
    for layer in runtime.model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(runtime.model, mesh=mesh, ignored_params=ignored)
    batches = batches_for(world)
    report, logits = run_pass(runtime, batches, rank)
    assert report.as_planned
    assert report.step_copies > 0
    expected = run_reference(reference, batches)
    for m in range(len(batches)):
        close_to(logits[m], expected[m][rank])
    gradients = runtime.full_gradients()
    for name, value in reference.gradients().items():
        mean = value if ".experts." in name else value / world
        error, _ = worst_error({name: gradients[name]}, {name: mean})
        assert error <= 1e-12 or float(value.abs().max()) < 1e-9, name
    state = runtime.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in reference.model.state_dict().items())
    runtime.load_full_state_dict(state)
    runtime.close()


def all_decoder_layers(rank: int, world: int) -> None:
    """A record with one row per decoder layer, as rollout engines write it, for a model with a dense first layer."""
    runtime, reference = build(rank, world, model_type="deepseek_v3")
    batches = batches_for(world, layers=2)
    expected = run_reference(reference, batches)
    for row in batches:
        for batch in row:
            dense = torch.zeros_like(batch.routing_TLK[:, :1])
            batch.routing_TLK = torch.cat([dense, batch.routing_TLK], dim=1)
    report, logits = run_pass(runtime, batches, rank)
    assert report.as_planned
    for m in range(len(batches)):
        close_to(logits[m], expected[m][rank])
    runtime.close()
