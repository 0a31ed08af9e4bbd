from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import Pools
from tests.distributed.verl_batches import make_model_directory
from tests.distributed.verl_checkpoint_cases import export, load_foreign, resume, shard_export

# The first case of a pool imports veRL on every rank, which takes long on a busy machine.
SECONDS = 400
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("world", [2, 4])
def test_a_resumed_run_goes_on_bit_by_bit_where_its_plans_are_the_same(
    pools: Pools, model: str, tmp_path: Path, world: int
) -> None:
    # Without replicas a plan depends on nothing; with them it also weighs the one before, which no checkpoint holds.
    static = {"planner": '{"strategy": "static"}', "expert_parallel": 2}
    answers = pools(world).run(
        resume, seconds=SECONDS, directory=model, checkpoint=str(tmp_path / "saved"), first=static, second=static
    )
    for answer in answers:
        assert answer["loaded"] == []
        assert answer["differing"] == []
        assert answer["norms"][0] == answer["norms"][1]
        assert answer["learning_rates"][0] == answer["learning_rates"][1]


def test_experts_are_stored_one_by_one_in_complete_files(pools: Pools, model: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    pools(2).run(resume, seconds=SECONDS, directory=model, checkpoint=str(tmp_path / "saved"), first={}, second={})
    files = sorted((tmp_path / "saved" / "experts").iterdir())
    assert [file.name for file in files] == [f"experts-0000{part}-of-00002.safetensors" for part in range(2)]
    with safe_open(files[1], framework="pt") as opened:
        names = set(opened.keys())
    prefix = "model.layers.2.mlp.experts.down_proj/7"
    assert {f"{prefix}/weight", f"{prefix}/exp_avg", f"{prefix}/exp_avg_sq", f"{prefix}/step"} <= names


@pytest.mark.parametrize(
    ("world", "change"),
    [
        (2, {}),
        (2, {"second": {"planner": '{"strategy": "static"}'}}),
        (2, {"moved": True}),
        (4, {"first": {"expert_parallel": 4}, "second": {"expert_parallel": 2, "planner": '{"redundantSlots": 1}'}}),
        (4, {"first": {"expert_parallel": 2}, "second": {"expert_parallel": 4}}),
    ],
    ids=["the same settings", "another strategy", "other homes", "smaller groups", "larger groups"],
)
def test_a_run_resumes_under_another_strategy_placement_or_size(
    pools: Pools, model: str, tmp_path: Path, world: int, change: dict[str, Any]
) -> None:
    arguments = {"first": {}, "second": {}, **change}
    for answer in pools(world).run(
        resume, seconds=SECONDS, directory=model, checkpoint=str(tmp_path / "saved"), **arguments
    ):
        assert answer["loaded"] == []
        # Sums over other groups of ranks are rounded in another order.
        assert answer["gradient"][0] < 1e-5
        assert answer["parameter"][0] < 1e-4


@pytest.mark.parametrize("world", [2, 4])
def test_the_exported_model_gives_the_same_log_probs_and_the_rollout_the_same_weights(
    pools: Pools, model: str, tmp_path: Path, world: int
) -> None:
    for answer in pools(world).run(
        export, seconds=SECONDS, directory=model, checkpoint=str(tmp_path / "saved"), expert_parallel=2
    ):
        assert answer["differing"] == []
        assert answer["log_probs"] < 1e-5
        assert answer["names"] == []
        assert answer["shapes"] == []
        assert answer["count"] > 60
        assert answer["streamed"] == []


def test_a_checkpoint_of_another_engine_is_refused_with_the_reason(pools: Pools, model: str, tmp_path: Path) -> None:
    for answer in pools(2).run(load_foreign, seconds=SECONDS, directory=model, checkpoint=str(tmp_path / "saved")):
        assert answer.startswith("TransferError")
        assert "written by another engine" in answer
        assert "expert" in answer


def test_updates_by_shards_are_refused_with_the_alternative(pools: Pools, model: str) -> None:
    for answer in pools(2).run(shard_export, seconds=SECONDS, directory=model):
        assert answer.startswith("TransferError")
        assert "checkpoint_engine.backend=naive" in answer
