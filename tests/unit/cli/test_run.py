"""`foremoe run` up to the first process, and how progress is drawn."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from foremoe.cli import run
from foremoe.cli.progress_view import ProgressView, curve, news
from foremoe.errors import LaunchError
from foremoe_operator.api.constants import Reason, Stage
from foremoe_operator.api.progress import Balance, CheckpointProgress, Problem, Progress

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_is_a_valid_job() -> None:
    name, spec = run.read_manifest(EXAMPLES / "grpo-tiny-moe.yaml")
    assert name == "grpo-tiny-moe" and spec.ranks == 2 and spec.parallelism.expert == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: [", "no YAML"),
        ("kind: ConfigMap", "holds 0 ForeMoEJob"),
        ("kind: ForeMoEJob\n---\nkind: ForeMoEJob", "holds 2 ForeMoEJob"),
        ("kind: ForeMoEJob\napiVersion: foremoe.io/v1alpha1\nmetadata: {name: a}", "spec: missing"),
        ("kind: ForeMoEJob\napiVersion: v2\nmetadata: {name: a}\nspec: {}", "apiVersion"),
    ],
)
def test_a_manifest_that_is_none_says_why(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(LaunchError, match=message):
        run.read_manifest(file)


def test_rules_across_fields_are_checked_as_in_a_cluster(tmp_path: Path) -> None:
    text = (EXAMPLES / "grpo-tiny-moe.yaml").read_text()
    file = tmp_path / "job.yaml"
    file.write_text(text.replace("path: /shared/model", "path: /elsewhere/model"))
    with pytest.raises(LaunchError, match=r"spec\.model\.path"):
        run.read_manifest(file)


def test_a_missing_file_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot read"):
        run.read_manifest(tmp_path / "none.yaml")


STEP = Progress(
    stage=Stage.ROLLOUT, step=3, total_steps=9, reward=0.5, step_seconds=2.0, balance=Balance(mean=1.25, max=2.0)
)


def test_news_are_one_line_each() -> None:
    assert news(Progress(), STEP, workers=2) == "step 3/9, reward 0.500, 2.0 s, imbalance 1.25 mean 2.00 worst"
    assert news(STEP, STEP.model_copy(update={"stage": Stage.UPDATE}), workers=2) == ""
    waiting = Progress(stage=Stage.WAITING_FOR_WORKERS, workers_joined=1)
    assert news(Progress(), waiting, workers=2) == "WaitingForWorkers (1/2 workers)"
    problem = Progress(problem=Problem(reason=Reason.MODEL_NOT_FOUND, message="no model"))
    assert news(Progress(), problem, workers=2) == "ModelNotFound: no model"
    saved = CheckpointProgress(step=3, path="/c", time=datetime(2026, 1, 1, tzinfo=UTC))
    assert news(STEP, STEP.model_copy(update={"checkpoint": saved}), workers=2) == "checkpoint of step 3: /c"


def test_a_terminal_gets_a_picture_and_a_file_gets_lines() -> None:
    for terminal in (True, False):
        output = io.StringIO()
        with ProgressView("a-job", Console(file=output, force_terminal=terminal, width=100), workers=2) as view:
            view.show(STEP)
            view.show(STEP)
        text = output.getvalue()
        assert "0.500" in text and ("imbalance" in text)
        assert ("a-job" in text) is terminal


def test_a_curve_goes_from_least_to_greatest() -> None:
    assert curve([0.0, 0.5, 1.0]) == "▁▄█"
    assert curve([1.0]) == "" and curve([2.0, 2.0]) == ""
