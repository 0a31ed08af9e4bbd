"""Progress from events."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.unit.agent.test_checks import spec_of

from foremoe.agent.tracker import Tracker
from foremoe_operator.api.constants import Reason, Stage
from foremoe_operator.api.progress import Problem

STEP = {"critic/score/mean": 0.5, "timing_s/step": 3.0, "timing_s/gen": 1.0}


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    return Tracker(spec_of(tmp_path), clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))


def test_a_step_brings_reward_and_time(tracker: Tracker) -> None:
    assert tracker.handle({"kind": "step", "step": 1, "metrics": STEP})
    assert (tracker.progress.step, tracker.progress.reward, tracker.progress.step_seconds) == (1, 0.5, 3.0)
    assert tracker.progress.first_step_time is not None


def test_the_step_counter_never_goes_back(tracker: Tracker) -> None:
    for step in (1, 3, 2):
        tracker.handle({"kind": "step", "step": step, "metrics": STEP})
    assert tracker.progress.step == 3


def test_metrics_of_a_validation_are_no_step(tracker: Tracker) -> None:
    tracker.handle({"kind": "step", "step": 5, "metrics": {"val-core/reward": 1.0}})
    assert tracker.progress.step == 0


def test_stages_and_balance(tracker: Tracker) -> None:
    tracker.handle({"kind": "stage", "stage": "Rollout"})
    tracker.handle({"kind": "balance", "step": 1, "mean": 1.25, "max": 2.0})
    assert tracker.progress.stage is Stage.ROLLOUT
    assert tracker.progress.balance is not None and tracker.progress.balance.max == 2.0


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"kind": "nonsense"},
        {"kind": "stage", "stage": "Sleeping"},
        {"kind": "step", "step": "x", "metrics": {}},
        {"kind": "step", "step": 1},
        {"kind": "balance", "mean": None, "max": 1},
    ],
)
def test_an_event_that_makes_no_sense_changes_nothing(tracker: Tracker, event: dict[str, Any]) -> None:
    before = tracker.progress
    assert not tracker.handle(event)
    assert tracker.progress == before


def test_a_late_stage_does_not_revive_a_finished_run(tracker: Tracker) -> None:
    tracker.finish(0)
    tracker.handle({"kind": "stage", "stage": "Rollout"})
    assert tracker.progress.stage is Stage.FINISHED


def test_the_first_problem_is_kept(tracker: Tracker) -> None:
    tracker.fail(Problem(reason=Reason.WORKER_LOST, message="first"))
    tracker.fail(Problem(reason=Reason.BOOT_FAILED, message="second"))
    assert tracker.progress.problem is not None and tracker.progress.problem.message == "first"


def test_the_log_is_kept_only_of_a_run_that_failed(tracker: Tracker) -> None:
    tracker.log("Traceback")
    tracker.finish(1)
    assert tracker.progress.log_tail == "Traceback"


def test_the_newest_complete_checkpoint_is_reported(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    (directory / "global_step_4").mkdir(parents=True)
    (directory / "global_step_6").mkdir()
    tracker = Tracker(spec_of(tmp_path))
    tracker.handle({"kind": "checkpoint"})
    assert tracker.progress.checkpoint is None
    (directory / "latest_checkpointed_iteration.txt").write_text("4")
    tracker.handle({"kind": "checkpoint"})
    assert tracker.progress.checkpoint is not None
    assert (tracker.progress.checkpoint.step, tracker.progress.checkpoint.path) == (4, str(directory / "global_step_4"))
