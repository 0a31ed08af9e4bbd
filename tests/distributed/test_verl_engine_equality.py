from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import Pools
from tests.distributed.verl_batches import make_model_directory
from tests.distributed.verl_equality_cases import equality

# The first case of a pool imports veRL on every rank, which takes long on a busy machine.
SECONDS = 400
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

GRADIENT, PARAMETER = 1e-5, 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_directory(tmp_path_factory.mktemp("tied"), tie=True)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "padded": (2, {}),
    "packed": (2, {"packed": True}),
    "packed and padded to a bucket": (2, {"packed": True, "pad_to_length": True, "pad_to_length_bucket": 16}),
    "dynamic batches": (2, {"dynamic": True, "packed": True}),
    "gradient checkpointing": (2, {"checkpointing": True}),
    "one group of four": (4, {}),
    "two groups of two": (4, {"expert_parallel": 2}),
    "two groups whose homes move": (4, {"expert_parallel": 2, "planner": '{"maxMoves": 2, "searchMoves": 200}'}),
    "two-dimensional mesh": (4, {"expert_parallel": 4, "fsdp_size": 2}),
    "static strategy": (2, {"planner": '{"strategy": "static"}'}),
    "dynamic slots": (2, {"planner": '{"redundantSlots": 0, "dynamicSlots": 1}'}),
}


@pytest.mark.parametrize("name", CASES)
def test_both_mini_batches_equal_the_stock_engine_with_a_forced_router(pools: Pools, model: str, name: str) -> None:
    world, settings = CASES[name]
    answers = pools(world).run(equality, seconds=SECONDS, directory=model, **settings)
    check(answers)
    copies, moves = (
        [mini_batch["metrics"][f"foremoe/{what}"][0] for answer in answers for mini_batch in answer[1:]]
        for what in ("copies", "moved_homes")
    )
    if name == "two groups whose homes move":
        # Whether moves leave anything for replicas to do is the planner's choice.
        assert any(copies) or any(moves)
    else:
        assert all(copies) if name != "static strategy" else not any(copies)
        assert not any(moves)


def test_tied_embeddings(pools: Pools, tied_model: str) -> None:
    check(pools(2).run(equality, seconds=SECONDS, directory=tied_model))


@pytest.mark.parametrize("world", [2, 4])
def test_bf16_compute_with_fp32_master_weights(pools: Pools, model: str, world: int) -> None:
    settings = {"param_dtype": "bf16", "packed": True, "expert_parallel": 2}
    for answer in pools(world).run(equality, seconds=SECONDS, directory=model, **settings):
        assert answer[0]["log_probs"] < 0.1
        for mini_batch in answer[1:]:
            # Eight bits of mantissa, and other orders of summation in dense and expert products.
            assert mini_batch["gradient"][0] < 0.05, mini_batch["gradient"]
            assert mini_batch["norm"][0] == pytest.approx(mini_batch["norm"][1], rel=0.01)
            assert mini_batch["metrics"]["foremoe/as_planned"] == [1.0]


def check(answers: list[list[dict[str, Any]]]) -> None:
    for answer in answers:
        # Every expert is owned once over all ranks, whatever the size of the groups.
        for owned in answer[-1]["owned"].values():
            assert owned * len(answers) == answer[-1]["experts"]
        assert answer[0]["log_probs"] < 1e-5
        for mini_batch in answer[1:]:
            assert mini_batch["loss"] < 1e-6
            assert mini_batch["gradient"][0] < GRADIENT, mini_batch["gradient"]
            assert mini_batch["parameter"][0] < PARAMETER, mini_batch["parameter"]
            ours, stock = mini_batch["norm"]
            assert ours == pytest.approx(stock, rel=1e-6)
            assert mini_batch["metrics"]["foremoe/as_planned"] == [1.0]
