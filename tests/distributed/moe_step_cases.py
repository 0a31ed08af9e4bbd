"""Cases about what happens inside a step: what a layer may ask of the device, and steps that end early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foremoe.moe import expert_parallel
from foremoe.planner import PlannerConfig
from foremoe.topology import Topology
from foremoe.transfer.control import ControlPlane
from tests.distributed.moe_cases import ep_group, run_pass
from tests.distributed.moe_models import loss_of, make_model, worst_error
from tests.distributed.moe_setup import LENGTHS, batches_for, build, caught, close_to, run_reference


class NoHostReads(TorchDispatchMode):
    """Fails on operators that make the host wait for a device value; knows the others that ran."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "item", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} reads the device"
        self.seen.append(name)
        return func(*args, **(kwargs or {}))


def no_host_reads(rank: int, world: int) -> None:
    """A planned micro-step reads no device value in a layer, and talks to the control group once."""
    runtime, _ = build(rank, world, dynamic_slots=1)
    batches = batches_for(world)
    talks = []
    gather = ControlPlane.gather

    def counted(self: ControlPlane, values: Any, *, what: str) -> Any:
        talks.append(what)
        return gather(self, values, what=what)

    runtime.begin_step([row[rank].routing_TLK for row in batches])
    block = runtime.model.model.layers[0].mlp
    hidden = torch.randn(1, LENGTHS[0][rank], 32, dtype=torch.float64, requires_grad=True)
    ControlPlane.gather = counted  # type: ignore[method-assign]
    try:
        with runtime.micro_step(0):
            block(hidden).sum().backward()  # the exchange at the entrance reads record and settings on the host
            with NoHostReads() as forward:
                out = block(hidden).sum()
            with NoHostReads() as backward:
                out.backward()
    finally:
        ControlPlane.gather = gather  # type: ignore[method-assign]
    # The hook has seen all there is: index maps, both exchanges and the products, on the way there and back.
    assert any("sort" in name for name in forward.seen)
    assert {"scatter_add_", "mm", "silu"} <= set(forward.seen)
    assert {"mm", "silu_backward"} <= set(backward.seen)
    for each in (forward, backward):
        assert each.seen.count("alltoall_base_") == 2, each.seen
    mine = [what for what in talks if "host memory" not in what and "host transfer" not in what]
    assert mine == ["entering micro-step 0"], talks
    runtime.end_step()
    # And it would notice: live routing has to know its counts.
    with pytest.raises(AssertionError, match="reads the device"), NoHostReads():
        block(hidden)
    runtime.close()


@contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Fails when the host waits for the device; where there is none, when it asks for a device value."""
    if device.type != "cuda":
        with NoHostReads():
            yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layer_without_synchronisation(rank: int, world: int, *, device: str, dtype: str) -> None:
    """One rank by itself: forward and backward of a planned layer, on a GPU under torch's own detector."""
    place, kind = torch.device(device), getattr(torch, dtype)
    runtime = expert_parallel(
        make_model("qwen3_moe", dtype=kind).to(place),
        group=ep_group(rank, world, 1),
        topology=Topology.uniform(ranks=1, ranks_per_node=1),
        config=PlannerConfig(strategy="static"),
    )
    runtime.begin_step([row[0].routing_TLK for row in batches_for(1, lengths=[[11], [4]])])
    block = runtime.model.model.layers[0].mlp
    hidden = torch.randn(1, 11, 32, dtype=kind, device=place, requires_grad=True)
    with runtime.micro_step(0):
        block(hidden).sum().backward()  # the first visit brings the record to the device
        with no_synchronisation(place):
            block(hidden).sum().backward()
    assert runtime.end_step().executed_MLR[0, 0, 0] == 2 * 11
    runtime.close()


def left_by_an_exception(rank: int, world: int, *, sharded: bool) -> None:
    """An error between the micro-steps, then one inside a backward: the next step is complete, and exact."""
    runtime, reference = build(rank, world, ep=2, sharded=sharded, dynamic_slots=1)
    batches = batches_for(world)
    record = [row[rank].routing_TLK for row in batches]

    def fail(*_arguments: Any) -> None:
        raise MemoryError("user code")

    for inside in (False, True):
        handle = runtime.model.model.layers[1].register_full_backward_pre_hook(fail) if inside else None
        runtime.begin_step(record)
        with pytest.raises(MemoryError), runtime.micro_step(0):
            loss_of(runtime.model, batches[0][rank])[0].backward()
            fail()
        if handle is not None:
            handle.remove()
        assert "abandon_step on every rank" in caught(lambda: runtime.begin_step(record))["text"]
        runtime.abandon_step()
    with torch.no_grad():
        close_to(loss_of(runtime.model, batches[0][rank])[1], reference.run(batches[0][rank], live=True)[1])
    runtime.model.zero_grad()
    report, logits = run_pass(runtime, batches, rank)
    expected = run_reference(reference, batches)
    assert report.as_planned
    assert report.copies > 0
    for m in range(len(batches)):
        close_to(logits[m], expected[m][rank])
    error, name = worst_error(runtime.full_gradients(), reference.gradients())
    assert error <= 1e-12, name
    runtime.close()


def left_at_different_places(rank: int, world: int) -> dict[str, Any]:
    """One rank has walked on by the time it gives up."""
    runtime, _ = build(rank, world, redundant_slots=0)
    runtime.begin_step([row[rank].routing_TLK for row in batches_for(world)])
    if rank == 1:
        assert runtime._step is not None
        runtime._step.counters.rows[0, 0] = 1
    found = caught(runtime.abandon_step)
    runtime.close()
    return found
