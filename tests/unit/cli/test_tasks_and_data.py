"""Problems of reasoning-gym as training data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("reasoning_gym")
parquet = pytest.importorskip("pyarrow.parquet")

from foremoe.cli import data, tasks  # noqa: E402
from foremoe.errors import LaunchError  # noqa: E402
from foremoe.verl import reward  # noqa: E402


def test_problems_are_distinct_and_repeatable() -> None:
    problems = tasks.distinct_problems(tasks.Task(), 40, seed=3)
    assert len({problem.question for problem in problems}) == 40
    assert problems == tasks.distinct_problems(tasks.Task(), 40, seed=3)
    assert problems != tasks.distinct_problems(tasks.Task(), 40, seed=4)


def test_a_task_with_too_few_problems_says_so() -> None:
    task = tasks.Task(settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    with pytest.raises(LaunchError, match="only about 200 distinct problems"):
        tasks.distinct_problems(task, 500, seed=0)


def test_unknown_tasks_and_settings_are_named() -> None:
    with pytest.raises(LaunchError, match=r"no task 'algebra9'.*chain_sum"):
        tasks.distinct_problems(tasks.Task(name="algebra9"), 1, seed=0)
    with pytest.raises(LaunchError, match="chain_sum refuses"):
        tasks.distinct_problems(tasks.Task(settings={"colour": "red"}), 1, seed=0)


def test_settings_are_json_or_text() -> None:
    assert tasks.parse_settings(["a=3", "b=[1,2]", "c=red"]) == {"a": 3, "b": [1, 2], "c": "red"}
    with pytest.raises(LaunchError, match="name=value"):
        tasks.parse_settings(["a"])


def test_written_rows_carry_what_the_verifier_needs(tmp_path: Path) -> None:
    result = CliRunner().invoke(data.app, ["create", str(tmp_path), "--train", "20", "--val", "5"])
    assert result.exit_code == 0, result.output
    train = parquet.read_table(tmp_path / "train.parquet").to_pylist()
    val = parquet.read_table(tmp_path / "val.parquet").to_pylist()
    questions = {row["prompt"][0]["content"] for row in train}
    assert len(questions) == 20 and questions.isdisjoint(row["prompt"][0]["content"] for row in val)
    for row in (*train, *val):
        answer = row["reward_model"]["ground_truth"]
        score = reward.compute_score(row["data_source"], answer, answer, row["extra_info"])
        assert score["verified"] == 1.0
        assert json.loads(row["extra_info"]["entry"])["answer"] == answer


def test_data_that_is_there_is_left_alone(tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["create", str(tmp_path), "--train", "4", "--val", "2"]
    runner.invoke(data.app, arguments)
    before = (tmp_path / "train.parquet").stat().st_mtime_ns
    result = runner.invoke(data.app, arguments)
    assert "already holds" in result.output and (tmp_path / "train.parquet").stat().st_mtime_ns == before
    runner.invoke(data.app, [*arguments, "--force"])
    assert (tmp_path / "train.parquet").stat().st_mtime_ns != before
