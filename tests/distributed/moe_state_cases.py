"""Cases in which state moves: homes of experts, checkpoints over sizes and numbers of groups (see `launch`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from foremoe.moe import ExpertParallelRuntime
from tests.distributed.moe_cases import reduce_dense, run_pass, shuffled_bases
from tests.distributed.moe_dense import ADAM
from tests.distributed.moe_models import loss_of, make_model, worst_error
from tests.distributed.moe_setup import batches_for, build, caught, close_to, run_reference


def moves_that_differ(rank: int, world: int) -> dict[str, Any]:
    runtime, _ = build(rank, world, ep=2, sharded=True)
    return caught(lambda: runtime.move_homes(shuffled_bases(3, 8, 2, seed=rank // 2)))


def one_bad_group(rank: int, world: int) -> dict[str, Any]:
    """A record that is refused in one group is refused in all, and all go on."""
    runtime, reference = build(rank, world, ep=2, sharded=True)
    batches = batches_for(world)
    records = [row[rank].routing_TLK.clone() for row in batches]
    if rank == 3:
        records[0][1, 2, 0] = 77
    found = caught(lambda: runtime.begin_step(records))
    _, logits = run_pass(runtime, batches, rank)
    close_to(logits[0], run_reference(reference, batches)[0][rank])
    runtime.close()
    return found


def checkpoints_over_groups(rank: int, world: int, first: int, second: int) -> None:
    """Saved with EP groups of `first` ranks, resumed with groups of `second`: every tensor and the next step."""
    states: list[Any] = []
    parts: list[tuple[ExpertParallelRuntime, torch.optim.Optimizer]] = []
    batches = batches_for(world)
    for ep in (first, second):
        runtime, _ = build(rank, world, ep=ep, sharded=ep < world, dynamic_slots=1)
        optimizer = torch.optim.AdamW(runtime.model.parameters(), foreach=False, **ADAM)
        runtime.attach_optimizer(optimizer)
        parts.append((runtime, optimizer))
    for index, (runtime, optimizer) in enumerate(parts):
        if index == 0:
            run_pass(runtime, batches, rank)
            reduce_dense(runtime, dist.group.WORLD)
            optimizer.step()
            optimizer.zero_grad()
            before = runtime.full_state_dict(), runtime.full_optimizer_state(optimizer)
            runtime.move_homes(shuffled_bases(3, 8, first, seed=3))
            states = [before, (runtime.full_state_dict(), runtime.full_optimizer_state(optimizer))]
        else:
            runtime.load_full_state_dict(states[0][0])
            runtime.load_full_optimizer_state(optimizer, states[0][1])
            states.append((runtime.full_state_dict(), runtime.full_optimizer_state(optimizer)))
    (weights, moments), *others = states
    for again, back in others:
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        assert all(torch.equal(back[n][k], moments[n][k]) for n in moments for k in moments[n])
    for runtime, optimizer in parts:
        run_pass(runtime, batches, rank)
        reduce_dense(runtime, dist.group.WORLD)
        optimizer.step()
    error, name = worst_error(parts[1][0].full_state_dict(), parts[0][0].full_state_dict())
    assert error <= 1e-12, name
    for runtime, _ in parts:
        runtime.close()


def checkpoints(rank: int, world: int) -> None:
    """Saved under one placement, EP size and strategy, resumed under another: same numbers."""
    runtime, reference = build(rank, world, strategy="foremoe", dynamic_slots=1)
    optimizer = torch.optim.AdamW(runtime.model.parameters(), foreach=False, **ADAM)
    runtime.attach_optimizer(optimizer)
    batches = batches_for(world)
    run_pass(runtime, batches, rank)
    reduce_dense(runtime, dist.group.WORLD)
    optimizer.step()
    optimizer.zero_grad()
    runtime.move_homes(shuffled_bases(3, 8, world, seed=3))
    weights, moments = runtime.full_state_dict(), runtime.full_optimizer_state(optimizer)

    resumed, _ = build(rank, world, strategy="static", ep=1)
    other = torch.optim.AdamW(resumed.model.parameters(), foreach=False, **ADAM)
    resumed.load_full_state_dict(weights)
    resumed.load_full_optimizer_state(other, moments)
    back, again = resumed.full_state_dict(), resumed.full_optimizer_state(other)
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    assert {n: sorted(s) for n, s in again.items()} == {n: sorted(s) for n, s in moments.items()}
    assert all(torch.equal(again[n][k], moments[n][k]) for n in moments for k in moments[n])

    for each, opt, sources in ((runtime, optimizer, [rank]), (resumed, other, list(range(world)))):
        flat = [batch for row in batches for batch in (row[source] for source in sources)]
        each.begin_step([batch.routing_TLK for batch in flat])
        for m, batch in enumerate(flat):
            with each.micro_step(m):
                loss_of(each.model, batch)[0].backward()
        each.end_step()
        if each is runtime:
            reduce_dense(each, dist.group.WORLD)
        opt.step()
    error, name = worst_error(resumed.full_state_dict(), runtime.full_state_dict())
    assert error <= 1e-12, name
    plain = make_model("qwen3_moe", seed=9)
    plain.load_state_dict(runtime.full_state_dict())
    with torch.no_grad():
        close_to(loss_of(runtime.model, batches[0][0])[1], loss_of(plain, batches[0][0])[1])
    assert reference
    runtime.close()
    resumed.close()


def planned_moves(rank: int, world: int) -> None:
    """A base the planner wants is made by an ownership move at the start of the step."""
    runtime, reference = build(rank, world, redundant_slots=0)
    optimizer = torch.optim.AdamW(runtime.model.parameters(), foreach=False, **ADAM)
    runtime.attach_optimizer(optimizer)
    planner: Any = runtime._planner
    wanted = shuffled_bases(3, 8, world, seed=5)
    plan = planner.plan

    def moved(load_MLE: Any, bases: Any) -> Any:
        return plan(load_MLE, wanted)

    planner.plan = moved
    batches = batches_for(world)
    report, _ = run_pass(runtime, batches, rank)
    assert report.moved_homes > 0
    assert report.as_planned
    assert list(runtime.bases) == wanted
    run_reference(reference, batches)
    error, name = worst_error(runtime.full_gradients(), reference.gradients())
    assert error <= 1e-12, name
    runtime.close()
