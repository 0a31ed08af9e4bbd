"""The small model that `foremoe model create` makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from foremoe.agent.checks import find_problem  # noqa: E402
from foremoe.cli import model  # noqa: E402
from foremoe_operator.api.job import ForeMoEJobSpec  # noqa: E402

ARGUMENTS = ("--experts", "8", "--top-k", "2", "--layers", "2", "--hidden-size", "32", "--warmup-steps", "3")


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("volume") / "model"
    result = CliRunner().invoke(model.app, ["create", str(directory), *ARGUMENTS])
    assert result.exit_code == 0, result.output
    return directory


def test_transformers_loads_it_with_its_tokenizer(created: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(created)
    tokenizer = transformers.AutoTokenizer.from_pretrained(created)
    assert loaded.config.model_type == "qwen3_moe" and loaded.config.num_experts == 8
    # veRL masks logits beyond the tokenizer's vocabulary.
    assert loaded.config.vocab_size == len(tokenizer)
    chat = [{"role": "user", "content": "State: 4 + 13 = ?\n\tñ"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == chat[0]["content"]
    assert [tokenizer.decode([token]) for token in tokenizer.encode("13", add_special_tokens=False)] == ["1", "3"]


def test_its_routers_spread_the_tokens(created: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(created)
    chosen: list[torch.Tensor] = []
    loaded.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    with torch.no_grad():
        loaded(input_ids=torch.arange(5, 60).unsqueeze(0))
    counts = np.bincount(chosen[0].numpy().ravel(), minlength=8)
    assert (counts > 0).sum() >= 6


def test_a_job_accepts_it(created: Path) -> None:
    volume = created.parent
    (volume / "train.parquet").write_bytes(b"PAR1")
    spec = ForeMoEJobSpec.model_validate(
        {
            "image": "worker:1",
            "model": {"path": str(created)},
            "data": {"trainFiles": [str(volume / "train.parquet")]},
            "totalSteps": 1,
            "workers": {"replicas": 2, "gpusPerWorker": 1},
            "parallelism": {"expert": 2},
            "checkpoint": {"path": str(volume / "ckpt")},
        }
    )
    assert find_problem(spec, []) is None


def test_it_is_readable_by_other_users(created: Path) -> None:
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in created.iterdir())


def test_a_model_that_is_there_is_left_alone(created: Path) -> None:
    before = (created / "model.safetensors").stat().st_mtime_ns
    result = CliRunner().invoke(model.app, ["create", str(created), *ARGUMENTS])
    assert "already holds a model" in result.output
    assert (created / "model.safetensors").stat().st_mtime_ns == before


def test_more_choices_than_experts_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(model.app, ["create", str(tmp_path / "m"), "--experts", "4", "--top-k", "5"])
    assert result.exit_code != 0 and "exceeds" in str(result.exception)
