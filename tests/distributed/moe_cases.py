"""Cases that run on every rank of a pool (see `launch`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector

from foremoe.moe import ExpertParallelRuntime, StepReport, expert_parallel
from foremoe.moe.benchmark import BenchmarkSettings, run_benchmark
from foremoe.planner import BasePlacement, PlannerConfig, plan_step
from foremoe.topology import Topology
from foremoe.transfer import PathName
from tests.distributed.moe_dense import ADAM, CLIP, Training, dense
from tests.distributed.moe_models import Batch, loss_of, worst_error
from tests.distributed.moe_scripted import plan_evenly

_GROUPS: dict[tuple[int, int], dist.ProcessGroup] = {}


def ep_group(rank: int, world: int, ep: int) -> dist.ProcessGroup:
    """The EP group of this rank when the world is cut into groups of `ep`."""
    for start in range(0, world, ep):
        if (start, ep) not in _GROUPS:
            made = dist.new_group(list(range(start, start + ep)))
            if start <= rank < start + ep:
                _GROUPS[start, ep] = made
            else:
                _GROUPS[start, ep] = dist.GroupMember.NON_GROUP_MEMBER
    return _GROUPS[rank // ep * ep, ep]


def twin_group(rank: int, world: int, ep: int) -> dist.ProcessGroup:
    """The ranks with this rank's place in all EP groups of `ep`."""
    for place in range(ep):
        if (-1 - place, ep) not in _GROUPS:
            _GROUPS[-1 - place, ep] = dist.new_group(list(range(place, world, ep)))
    return _GROUPS[-1 - rank % ep, ep]


def reduce_dense(runtime: ExpertParallelRuntime, group: dist.ProcessGroup) -> None:
    """Sum the gradients of everything but the experts, as a data-parallel wrapper would, in one exchange."""
    parameters = runtime.dense_parameters()
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    total = parameters_to_vector([parameter.grad for parameter in parameters])
    dist.all_reduce(total, group=group)
    for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def run_pass(
    runtime: ExpertParallelRuntime,
    batches: Sequence[Sequence[Batch]],
    source: int,
    *,
    backward: bool = True,
    forecast: bool = False,
) -> tuple[StepReport, list[torch.Tensor]]:
    """One step of this rank over its micro-steps; the logits of every micro-step."""
    runtime.begin_step([row[source].routing_TLK for row in batches], forecast=forecast)
    logits = []
    for index, row in enumerate(batches):
        with runtime.micro_step(index):
            if backward:
                loss, out = loss_of(runtime.model, row[source])
                loss.backward()
            else:
                with torch.no_grad():
                    out = loss_of(runtime.model, row[source])[1]
            logits.append(out)
    return runtime.end_step(), logits


def equality(
    rank: int,
    world: int,
    *,
    ep: int = 2,
    config: dict[str, Any] | None = None,
    steps: int = 3,
    ranks_per_node: int | None = None,
    path: str | None = None,
    checkpointing: bool = False,
    move: bool = False,
    real_planner: bool = False,
    sharded: bool = False,
    **training: Any,
) -> dict[str, Any]:
    """Outputs, gradients, norms and parameters over `steps` AdamW steps against the dense `training`.

    Without `sharded` every EP group is a model of its own, fed with the same batches; with it the groups are one model,
    and every rank of the world has batches of its own.
    """
    group = ep_group(rank, world, ep)
    source, sources = (rank, world) if sharded else (dist.get_rank(group), ep)
    setting = Training.of(sources=sources, **training)
    model = setting.model()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    runtime = expert_parallel(
        model,
        group=group,
        twins=twin_group(rank, world, ep) if sharded else None,
        topology=Topology.uniform(ranks=ep, ranks_per_node=ranks_per_node or ep),
        config=PlannerConfig(**(config or {})),
        path=None if path is None else PathName(path),
        plan=plan_step if real_planner else plan_evenly,
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **ADAM)
    runtime.attach_optimizer(optimizer)
    result: dict[str, Any] = {"output": 0.0, "gradient": (0.0, ""), "norm": 0.0, "parameter": (0.0, ""), "reports": []}
    for number in range(steps):
        if move and number:
            bases = shuffled_bases(len(runtime.bases), setting.experts, ep, seed=number)
            result["moved"] = runtime.move_homes(bases)
        expected = dense(setting).step(number)
        report, logits = run_pass(runtime, expected.batches, source)
        result["reports"].append(summary(report))
        compare_step(result, runtime, logits, [row[source] for row in expected.logits], expected.gradients)
        reduce_dense(runtime, dist.group.WORLD if sharded else group)
        norm = float(runtime.clip_gradients(CLIP * expected.norm))
        result["norm"] = max(result["norm"], abs(norm / expected.norm - 1))
        optimizer.step()
        optimizer.zero_grad()
        result["parameter"] = max(result["parameter"], worst_error(runtime.full_state_dict(), expected.parameters))
    result["homes"] = [base.home_E.tolist() for base in runtime.bases]
    if sharded and runtime.config.max_moves != 0:
        assert result["homes"] == homes_for_all_groups(expected.batches, ep, runtime)
    result |= expert_sizes(runtime, optimizer, expected.parameters)
    runtime.close()
    return result


def compare_step(
    result: dict[str, Any],
    runtime: ExpertParallelRuntime,
    logits: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    gradients: dict[str, torch.Tensor],
) -> None:
    """Put the largest errors of outputs and gradients into the result; looking at gradients must not change them."""
    for got, expected in zip(logits, wanted, strict=True):
        result["output"] = max(result["output"], float((got - expected).abs().max()) / float(expected.abs().max()))
    named = list(runtime.model.named_parameters())
    before = {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}
    result["gradient"] = max(result["gradient"], worst_error(runtime.full_gradients(), gradients))
    for name, parameter in named:
        if parameter.grad is not None:
            assert torch.equal(before[name], parameter.grad), f"full_gradients changed {name}"


def expert_sizes(
    runtime: ExpertParallelRuntime, optimizer: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """What this rank owns of the experts and their optimizer state, and how much there is of all experts."""
    mine = runtime.expert_parameters()
    owned = {key: sum(optimizer.state[p][key].numel() for p in mine) for key in ("exp_avg", "exp_avg_sq")}
    return {
        "owned": owned | {"weight": sum(parameter.numel() for parameter in mine)},
        "experts": sum(value.numel() for name, value in parameters.items() if ".experts." in name),
    }


def homes_for_all_groups(batches: Sequence[Sequence[Batch]], ep: int, runtime: ExpertParallelRuntime) -> list[Any]:
    """Where `plan_evenly` puts the experts of each layer for the groups' mean load of these micro-steps."""
    experts = runtime.bases[0].experts
    homes = []
    for layer, base in enumerate(runtime.bases):
        load_MSE = np.stack(
            [[np.bincount(b.routing_TLK[:, layer].reshape(-1), minlength=experts) for b in row] for row in batches]
        )
        groups = load_MSE.reshape(len(batches), -1, ep, experts)
        mean_MSE = np.rint(groups.mean(axis=1)).astype(np.int64)
        config = runtime.config.model_copy(update={"max_moves": None})
        homes.append(plan_evenly(mean_MSE, base=base, topology=runtime.topology, config=config).base.home_E.tolist())
    return homes


def shuffled_bases(layers: int, experts: int, ranks: int, *, seed: int) -> list[BasePlacement]:
    """Another placement for every layer, the same on all ranks."""
    rng = np.random.default_rng(seed)
    contiguous = BasePlacement.contiguous(experts=experts, ranks=ranks).home_E
    return [BasePlacement(home_E=rng.permutation(contiguous), ranks=ranks) for _ in range(layers)]


def summary(report: StepReport) -> dict[str, Any]:
    return {
        "as_planned": report.as_planned,
        "planned": report.planned_MLR.tolist(),
        "executed": report.executed_MLR.tolist(),
        "live": report.live_MLR.tolist(),
        "imbalance": report.imbalance_ML.tolist(),
        "step_copies": report.step_copies,
        "dynamic_copies": report.dynamic_copies,
        "moved_homes": report.moved_homes,
        "live_rows": report.live_rows,
        "unplanned": report.unplanned_micro_steps,
        "mismatches": [str(mismatch) for mismatch in report.mismatches],
        "nonfinite": report.nonfinite_layers,
        "fell_back": report.fell_back,
        "host_moves": report.host_moves,
        "direct_moves": report.direct_moves,
        "hidden": report.hidden_seconds,
        "exposed": report.exposed_seconds,
        "replica_bytes": report.replica_bytes,
    }


def benchmark(rank: int, world: int) -> list[Any]:
    settings = BenchmarkSettings(hidden=32, expert_width=32, tokens=64, micro_steps=2, rounds=1, layers=2)
    group = dist.group.WORLD
    assert group is not None
    return run_benchmark(settings, group=group, device=torch.device("cpu"))
