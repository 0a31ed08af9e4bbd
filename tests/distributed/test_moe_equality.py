"""Outputs, every gradient and the parameters after three AdamW steps equal a dense single process."""

from __future__ import annotations

from typing import Any

import pytest

from foremoe.planner.strategies import STRATEGIES
from tests.distributed import moe_cases
from tests.distributed.launch import Pools
from tests.distributed.moe_dense import Training, steepness
from tests.distributed.moe_models import MODEL_TYPES

pytestmark = pytest.mark.distributed

FP64, FP32 = 1e-12, 1e-5
STEP = {"redundant_slots": 1}
DYNAMIC = {"redundant_slots": 0, "dynamic_slots": 2}
BOTH = {"redundant_slots": 1, "dynamic_slots": 1}


def check(pools: Pools, world: int, *, bound: float = FP64, **arguments: Any) -> list[dict[str, Any]]:
    """Run on all ranks, compare, and return the results by rank."""
    results = pools(world).run(moe_cases.equality, **arguments)
    for result in results:
        assert result["output"] <= bound
        assert result["gradient"][0] <= bound, result["gradient"]
        assert result["norm"] <= bound
        assert result["parameter"][0] <= bound, result["parameter"]
        for report in result["reports"]:
            assert not report["mismatches"]
            assert report["as_planned"]
    return results


def copies(result: dict[str, Any]) -> tuple[int, int]:
    reports = result["reports"]
    return sum(r["step_copies"] for r in reports), sum(r["dynamic_copies"] for r in reports)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_model_with_both_kinds_of_replicas(pools: Pools, model_type: str) -> None:
    step_copies, dynamic_copies = copies(check(pools, 2, model_type=model_type, config=BOTH)[0])
    assert step_copies > 0
    assert dynamic_copies > 0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy(pools: Pools, strategy: str, dtype: str) -> None:
    config = {"strategy": strategy, **BOTH}
    check(pools, 2, config=config, dtype=dtype, bound=FP64 if dtype == "float64" else FP32, real_planner=True)


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("config", [{"strategy": "static"}, BOTH], ids=["static", "replicas"])
def test_every_group_size(pools: Pools, ep: int, config: dict[str, Any]) -> None:
    check(pools, 4, ep=ep, config=config, steps=2)


SHARDED: dict[str, dict[str, Any]] = {
    "static": {"config": {"strategy": "static"}},
    "fp32": {"config": STEP, "dtype": "float32", "bound": FP32},
    "both kinds of replicas": {"config": BOTH, "checkpointing": True, "steps": 2},
    "no expert parallelism": {"ep": 1, "config": BOTH, "steps": 2},
    "rows that do not divide": {"ep": 1, "config": STEP, "changes": {"moe_intermediate_size": 13}, "steps": 2},
    "ownership moves": {"config": STEP, "move": True},
    "moves that the planner wants": {"config": {**STEP, "max_moves": None}},
    "rows without a record": {"config": BOTH, "live_every": 3, "skip_every": 4, "steps": 2},
    "empty ranks": {"config": STEP, "lengths_MS": [[0, 9, 0, 0], [7, 0, 3, 4], [0, 0, 0, 0]], "steps": 2},
}


@pytest.mark.parametrize("case", SHARDED)
def test_experts_sharded_over_several_groups(pools: Pools, case: str) -> None:
    arguments = {"ep": 2, **SHARDED[case]}
    results = check(pools, 4, sharded=True, **arguments)
    for result in results:
        # Every expert exists once over the four ranks; a row of each matrix may be filling.
        for owned in result["owned"].values():
            assert result["experts"] <= 4 * owned <= 1.12 * result["experts"]
            assert "divide" in case or 4 * owned == result["experts"]
        assert result["homes"] == results[0]["homes"]
    moved = sum(report["moved_homes"] for report in results[0]["reports"]) + results[0].get("moved", 0)
    assert (moved > 0) == ("moves" in case)


def test_step_replicas_alone_bring_nothing_within_micro_steps(pools: Pools) -> None:
    step_copies, dynamic_copies = copies(check(pools, 2, config=STEP, dtype="float32", bound=FP32)[0])
    assert step_copies > 0
    assert dynamic_copies == 0


def test_dynamic_replicas_alone(pools: Pools) -> None:
    results = check(pools, 2, config=DYNAMIC, dtype="float32", bound=FP32)
    assert copies(results[0])[1] > 0


@pytest.mark.parametrize(
    ("path", "ranks_per_node"), [("host", 2), ("direct", 2), ("host", 1)], ids=["host", "direct", "across-nodes"]
)
def test_both_paths_move_the_same(pools: Pools, path: str, ranks_per_node: int) -> None:
    results = check(pools, 2, config=BOTH, path=path, ranks_per_node=ranks_per_node, steps=2)
    report = results[0]["reports"][0]
    assert (report["host_moves"] > 0) == (path == "host")
    # Gradients go directly between nodes, whichever way the weights came.
    assert (report["direct_moves"] > 0) == (path == "direct" or ranks_per_node == 1)


SHAPES: dict[str, dict[str, Any]] = {
    "empty ranks": {"lengths_MS": [[0, 9], [7, 0], [0, 0]]},
    "sequences of length 1": {"lengths_MS": [[1, 1], [1, 4]]},
    "unequal micro-steps": {"lengths_MS": [[40, 2], [3, 17], [1, 30]]},
    "experts without a token": {"only": [0, 1, 2]},
    "one expert with all tokens": {"top_k": 1, "only": [1]},
    "top-k of all experts": {"top_k": 8},
    "one expert a rank": {"experts": 2, "top_k": 2},
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("config", [{"strategy": "static"}, BOTH], ids=["static", "replicas"])
def test_unusual_shapes(pools: Pools, shape: str, config: dict[str, Any]) -> None:
    check(pools, 2, config=config, steps=2, **SHAPES[shape])


def test_rows_without_a_record_are_live_and_others_skip(pools: Pools) -> None:
    results = check(pools, 2, config=BOTH, live_every=3, skip_every=4, steps=2, lengths_MS=[[9, 14], [8, 3]])
    report = results[0]["reports"][0]
    assert report["live_rows"] > 0
    assert report["live"] != [[[0, 0]] * 3] * 2


def test_skipped_rows_need_no_live_dispatch(pools: Pools) -> None:
    report = check(pools, 2, config=BOTH, skip_every=3, steps=1)[0]["reports"][0]
    assert report["live_rows"] == 0


@pytest.mark.parametrize("config", [STEP, DYNAMIC], ids=["step", "dynamic"])
def test_activation_checkpointing_follows_the_same_plan(pools: Pools, config: dict[str, Any]) -> None:
    check(pools, 2, config=config, checkpointing=True, steps=2)


def test_ownership_moves_carry_everything_along(pools: Pools) -> None:
    results = check(pools, 2, config=STEP, move=True)
    assert results[0]["moved"] > 0


def test_other_activations(pools: Pools) -> None:
    check(pools, 2, config=STEP, changes={"hidden_act": "gelu"}, steps=1)


def test_gradients_are_true_where_they_peak(pools: Pools) -> None:
    """A record the router has left far behind, and tokens whose embedding is next to zero (docs/runtime.md)."""
    smallest_mass, ratio = steepness(Training.of(sources=2, steep=True))
    assert smallest_mass < 1e-6
    assert ratio > 10
    check(pools, 2, config=BOTH, steep=True, steps=1)


def test_tied_embeddings(pools: Pools) -> None:
    check(pools, 2, config=STEP, changes={"tie_word_embeddings": True}, steps=2)


def test_bf16_stays_within_its_rounding(pools: Pools) -> None:
    """bf16 keeps 8 bits; three layers and three steps stay within a few of its units (2^-8) of each tensor's scale."""
    check(pools, 2, config=BOTH, dtype="bfloat16", bound=6e-2, steps=1)
