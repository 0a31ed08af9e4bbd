"""The runtime's contract beyond equality (docs/runtime.md)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed import moe_cases
from tests.distributed import moe_contract_cases as cases
from tests.distributed import moe_state_cases as state_cases
from tests.distributed import moe_step_cases as steps
from tests.distributed.launch import Pools

pytestmark = pytest.mark.distributed


def test_parameters_keep_names_and_experts_are_local(pools: Pools) -> None:
    pools(2).run(cases.parameters)


@pytest.mark.parametrize("world", [2, 4])
def test_live_routing_without_a_step(pools: Pools, world: int) -> None:
    pools(world).run(cases.live_without_a_step, sharded=world == 4)


@pytest.mark.parametrize("dynamic", [0, 1])
def test_passes_and_repeated_micro_steps_are_counted_once_and_reports_agree(pools: Pools, dynamic: int) -> None:
    first, second = pools(2).run(cases.passes, dynamic=dynamic)
    assert first == second


def test_calls_out_of_order_say_what_to_do(pools: Pools) -> None:
    pools(2).run(cases.order_of_calls)


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_left_by_an_exception_is_abandoned_and_the_next_one_is_exact(pools: Pools, world: int) -> None:
    pools(world).run(steps.left_by_an_exception, sharded=world == 4)


def test_ranks_that_left_a_step_at_different_places_are_told_to_start_again(pools: Pools) -> None:
    for found in pools(2).run(steps.left_at_different_places):
        assert (found["kind"], found["rank"]) == ("TransferError", 1)
        assert "start all processes again" in found["text"]


def test_policy_and_forecasting_reference_in_one_process(pools: Pools) -> None:
    pools(2).run(cases.two_models)


@pytest.mark.parametrize("world", [2, 4])
def test_equal_runs_give_equal_bits(pools: Pools, world: int) -> None:
    pools(world).run(cases.twice_the_same, sharded=world == 4)


def test_replicas_follow_the_optimizer(pools: Pools) -> None:
    pools(2).run(cases.replicas_follow_the_optimizer)


def test_extra_memory_is_slots_and_their_gradients(pools: Pools) -> None:
    pools(2).run(cases.memory)


def test_a_planned_layer_reads_nothing_from_the_device(pools: Pools) -> None:
    pools(2).run(steps.no_host_reads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_by_itself_reads_nothing_from_the_device(pools: Pools, dtype: str) -> None:
    pools(2).run(steps.layer_without_synchronisation, device="cpu", dtype=dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's synchronisation detector needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planned_layer_does_not_synchronise_with_the_gpu(dtype: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        steps.layer_without_synchronisation(0, 1, device="cuda:0", dtype=dtype)
    finally:
        dist.destroy_process_group()


def test_a_block_without_rows_keeps_the_graph(pools: Pools) -> None:
    pools(2).run(cases.block_without_rows)


def test_checkpoints_do_not_depend_on_the_placement(pools: Pools) -> None:
    pools(2).run(state_cases.checkpoints)


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 2), (2, 1)])
def test_checkpoints_do_not_depend_on_the_number_of_groups(pools: Pools, first: int, second: int) -> None:
    pools(4).run(state_cases.checkpoints_over_groups, first=first, second=second)


def test_sharded_experts_are_gathered_once_and_in_the_compute_dtype(pools: Pools) -> None:
    pools(4).run(cases.mixed_precision)


def test_what_one_group_refuses_all_groups_refuse(pools: Pools) -> None:
    for found in pools(4).run(state_cases.moves_that_differ):
        assert found["kind"] == "PlannerError"
        assert "alike in all expert-parallel groups" in found["text"]
    for found in pools(4).run(state_cases.one_bad_group):
        assert found["kind"] == "RoutingError"
        assert found["expert"] == 77


def test_composes_with_fsdp(pools: Pools) -> None:
    pools(2).run(cases.fsdp)


def test_a_new_base_of_the_planner_moves_homes(pools: Pools) -> None:
    pools(2).run(state_cases.planned_moves)


def test_all_decoder_layers_in_the_record(pools: Pools) -> None:
    pools(2).run(cases.all_decoder_layers)


def test_the_benchmark_runs_every_variant_as_planned(pools: Pools) -> None:
    """Sizes too small to measure anything; what is checked is that each variant is what it says."""
    first, second = pools(2).run(moe_cases.benchmark)
    assert first == second
    runs = {run.variant: run for run in first}
    assert set(runs) == {"forced", "even", "static", "eplb", "foremoe"}
    assert all(run.as_planned for run in first)
    assert runs["forced"].imbalance == runs["even"].imbalance == 1.0
    assert abs(runs["static"].imbalance - 1.6) < 0.02
    assert runs["static"].copies == 0
