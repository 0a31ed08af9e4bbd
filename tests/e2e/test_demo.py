"""The demo on the embedded cluster: the example job in real pods, and what it leaves behind.

Status, trace and checkpoint are looked at as a user would: through the API server and on the shared volume.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from foremoe.routing import TraceReader
from foremoe_cluster.demo import NAMESPACE, Outcome, demo
from foremoe_cluster.settings import SHARED_VOLUMES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3000)]

STEPS = 20
STEP_LINE = re.compile(r"step:(\d+) - .*critic/score/mean:([0-9.]+)")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return demo(kubeconfig=None, image=None, operator_image=None)


@pytest.fixture(scope="module")
def volume(outcome: Outcome) -> Path:
    claim = outcome.tools.get("-n", NAMESPACE, "pvc", "foremoe-demo")
    assert claim is not None
    return SHARED_VOLUMES / str(claim["spec"]["volumeName"])


def test_status_tells_step_reward_balance_and_checkpoint(outcome: Outcome) -> None:
    status, progress = outcome.status, outcome.status["progress"]
    assert progress["step"] == progress["totalSteps"] == STEPS
    assert 0.0 <= float(progress["reward"]) <= 1.1
    assert float(progress["balance"]["mean"]) >= 1.0
    assert progress["balance"]["asPlanned"] is True
    assert float(progress["balance"]["executed"]) < float(progress["balance"]["mean"])
    assert status["checkpoint"]["latestStep"] == STEPS
    conditions = {entry["type"]: entry["status"] for entry in status["conditions"]}
    assert conditions["Complete"] == "True" and conditions.get("Failed") != "True"
    outcome.tools.kubectl("-n", NAMESPACE, "wait", "--for=condition=Complete", f"fmj/{outcome.job}", "--timeout=5s")


def test_the_reward_rises(outcome: Outcome) -> None:
    assert len(outcome.rewards) >= STEPS // 2, "most steps were seen in the status"
    # The head's log has all of them but perhaps the last.
    log = outcome.tools.kubectl("-n", NAMESPACE, "logs", f"{outcome.job}-head-0")
    told = {int(step): float(reward) for step, reward in STEP_LINE.findall(log)}
    assert told.keys() >= set(range(1, STEPS))
    assert all(
        told[step] == pytest.approx(reward, abs=1e-3) for step, reward in outcome.rewards.items() if step in told
    )
    rewards = [told[step] for step in sorted(told)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1


def test_the_trace_holds_every_pass_as_it_ran(outcome: Outcome, volume: Path) -> None:
    reader = TraceReader(volume / "traces" / outcome.job)
    steps = sorted({info.step for info in reader.passes()})
    assert steps == list(range(1, STEPS + 1))
    assert (reader.meta.experts, reader.meta.layers, reader.meta.source_ranks, reader.meta.top_k) == (16, 4, 2, 4)
    for info in reader.passes():
        record = reader.record(info)
        assert record.executed_MLR is not None
        np.testing.assert_array_equal(
            np.asarray(record.executed_MLR).sum(axis=-1), np.asarray(record.load_MLSE).sum(axis=(-2, -1))
        )


def test_the_checkpoint_is_whole(outcome: Outcome, volume: Path) -> None:
    directory = volume / "checkpoints" / outcome.job
    assert outcome.status["checkpoint"]["path"].endswith(f"{outcome.job}/global_step_{STEPS}")
    assert (directory / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEPS)
    actor = directory / f"global_step_{STEPS}" / "actor"
    assert len(list(actor.glob("model_world_size_2_rank_*.pt"))) == 2


def test_ended_jobs_hold_no_gpu_and_deleted_ones_nothing(outcome: Outcome) -> None:
    selector = f"foremoe.io/job={outcome.job}"

    def left() -> list[str]:
        text = outcome.tools.kubectl("-n", NAMESPACE, "get", "pods,services,configmaps", "-l", selector, "-o", "json")
        return [item["metadata"]["name"] for item in json.loads(text)["items"]]

    # They were told to go when the job completed, and may take their grace period.
    workers = f"{selector},foremoe.io/role=worker"
    outcome.tools.kubectl("-n", NAMESPACE, "wait", "--for=delete", "pod", "-l", workers, "--timeout=60s")
    assert not [name for name in left() if "-worker-" in name]
    outcome.tools.kubectl(
        "-n", NAMESPACE, "delete", "fmj", outcome.job, "--cascade=foreground", "--wait", "--timeout=120s", timeout=150
    )
    assert left() == []
