"""What the head says before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foremoe.agent import checks
from foremoe_operator.api.constants import Reason
from foremoe_operator.api.job import ForeMoEJobSpec


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_experts": 16}))
    (model / "model.safetensors").write_bytes(b"x")
    (tmp_path / "train.parquet").write_bytes(b"PAR1...")
    return tmp_path


def spec_of(volume: Path, **changes: Any) -> ForeMoEJobSpec:
    fields: dict[str, Any] = {
        "image": "worker:1",
        "model": {"path": str(volume / "model")},
        "data": {"trainFiles": [str(volume / "train.parquet")]},
        "totalSteps": 1,
        "workers": {"replicas": 2, "gpusPerWorker": 1},
        "checkpoint": {"path": str(volume / "ckpt")},
    }
    return ForeMoEJobSpec.model_validate(fields | changes)


def problem_of(spec: ForeMoEJobSpec, arguments: list[str] | None = None) -> tuple[Reason, str]:
    problem = checks.find_problem(spec, arguments or [])
    assert problem is not None
    return problem.reason, problem.message


def test_nothing_is_wrong(volume: Path) -> None:
    assert checks.find_problem(spec_of(volume), ["data.train_batch_size=4", "hydra.run.dir=."]) is None


def test_a_missing_model_is_named_with_what_to_do(volume: Path) -> None:
    reason, message = problem_of(spec_of(volume, model={"path": "/nowhere/model"}))
    assert reason is Reason.MODEL_NOT_FOUND
    assert "/nowhere/model does not exist" in message and "foremoe model create" in message


def test_a_model_without_weights_is_no_model(volume: Path) -> None:
    (volume / "model" / "model.safetensors").unlink()
    reason, message = problem_of(spec_of(volume))
    assert reason is Reason.MODEL_NOT_FOUND and "weights" in message


@pytest.mark.parametrize("config", ["{", json.dumps({"hidden_size": 3}), "[]", json.dumps({"num_experts": "8"})])
def test_a_model_that_is_no_mixture_of_experts_is_refused(volume: Path, config: str) -> None:
    (volume / "model" / "config.json").write_text(config)
    reason, message = problem_of(spec_of(volume))
    assert reason in (Reason.MODEL_NOT_FOUND, Reason.BOOT_FAILED) and "config.json" in message


def test_experts_of_a_nested_configuration_are_found() -> None:
    assert checks.expert_count({"text_config": {"n_routed_experts": 64}}) == 64


def test_experts_must_divide_over_the_group(volume: Path) -> None:
    reason, message = problem_of(
        spec_of(volume, workers={"replicas": 3, "gpusPerWorker": 1}, parallelism={"expert": 3})
    )
    assert reason is Reason.BOOT_FAILED and "16 experts" in message and "parallelism.expert = 3" in message


def test_missing_data_is_named(volume: Path) -> None:
    _, message = problem_of(spec_of(volume, data={"trainFiles": [str(volume / "no.parquet")]}))
    assert "no.parquet" in message and "data.trainFiles" in message


def test_data_that_is_no_parquet_is_named(volume: Path) -> None:
    (volume / "train.parquet").write_text("question,answer")
    assert "no parquet" in problem_of(spec_of(volume))[1]


def test_a_checkpoint_path_that_cannot_be_made_is_named(volume: Path) -> None:
    (volume / "ckpt").write_text("a file")
    assert "checkpoint.path" in problem_of(spec_of(volume))[1]


def test_a_setting_that_verl_does_not_have_is_named(volume: Path) -> None:
    reason, message = problem_of(spec_of(volume), ["data.trian_batch_size=4"])
    assert reason is Reason.BOOT_FAILED and "data.trian_batch_size" in message


def test_the_engine_cannot_be_replaced(volume: Path) -> None:
    argument = "actor_rollout_ref.model.external_lib=mine"
    assert "external_lib" in problem_of(spec_of(volume, args=[argument]))[1]
