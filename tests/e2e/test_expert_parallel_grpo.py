"""The example with experts in parallel: twenty steps as planned, and a resume under another strategy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from foremoe.routing import TraceReader, rank_loads
from foremoe.routing.counting import imbalance
from foremoe_operator.api.progress import Progress

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3000)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo-tiny-moe.yaml"
STEPS, RESUMED = 20, 22
AS_PLANNED, EXECUTED = "actor/foremoe/as_planned", "actor/foremoe/imbalance_executed"


def foremoe(directory: Path, *arguments: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from foremoe.cli.main import main; main()", *arguments],
        cwd=directory, env={**os.environ, **environment}, text=True, capture_output=True, timeout=1500, check=False,
    )  # fmt: skip
    log = directory / ".foremoe" / "runs" / "grpo-tiny-moe" / "head" / "log"
    tail = log.read_text(errors="replace")[-6000:] if log.exists() else ""
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{tail}"


@dataclass(frozen=True)
class Run:
    """What a run left."""

    progress: Progress
    log: str
    metrics: list[dict[str, float]]
    """Of each of its steps. What an actor prints last may be lost when the driver ends, so they go into a file."""

    def told(self, name: str) -> list[float]:
        return [step[name] for step in self.metrics]


def run(directory: Path, *, steps: int, resume: str, **environment: str) -> Run:
    """Run the example for `steps` steps in all."""
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"]["checkpoint"]["resume"] = resume
    job["spec"]["args"].append("trainer.logger=[console,file]")
    metrics = directory / f"metrics-{steps}.jsonl"
    job["spec"]["env"] = [{"name": "VERL_FILE_LOGGER_PATH", "value": str(metrics)}]
    manifest = directory / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    foremoe(directory, "run", str(manifest), "--steps", str(steps), **environment)
    head = directory / ".foremoe" / "runs" / "grpo-tiny-moe" / "head"
    return Run(
        progress=Progress.model_validate_json((head / "termination.json").read_bytes()),
        log=(head / "log").read_text(),
        metrics=[json.loads(line)["data"] for line in metrics.read_text().splitlines()],
    )


def test_twenty_steps_run_as_planned_and_their_checkpoint_resumes_under_another_strategy(tmp_path: Path) -> None:
    volume = tmp_path / ".foremoe" / "volumes" / "foremoe-demo"
    foremoe(tmp_path, "data", "create", str(volume / "data"))
    foremoe(tmp_path, "model", "create", str(volume / "model"), "--warmup-steps", "20")

    trained = run(tmp_path, steps=STEPS, resume="Never")
    progress = trained.progress
    assert progress.step == STEPS
    assert progress.balance is not None and progress.balance.as_planned is True
    assert progress.balance.executed is not None and progress.balance.executed < progress.balance.mean
    assert trained.told(AS_PLANNED) == [1.0] * STEPS
    assert "was not executed as planned" not in trained.log
    told = trained.told(EXECUTED)
    check_trace(volume / "traces" / "grpo-tiny-moe", first=1, last=STEPS, balanced=True, told=told)

    assert progress.checkpoint is not None
    actor = Path(progress.checkpoint.path) / "actor"
    assert len(list((actor / "experts").glob("*.safetensors"))) == 2

    resumed = run(tmp_path, steps=RESUMED, resume="Auto", FOREMOE_PLANNER_CONFIG='{"strategy": "static"}')
    assert resumed.progress.step == RESUMED
    assert resumed.told(AS_PLANNED) == [1.0] * (RESUMED - STEPS)
    told = resumed.told(EXECUTED)
    check_trace(volume / "traces" / "grpo-tiny-moe", first=STEPS + 1, last=RESUMED, balanced=False, told=told)


def check_trace(directory: Path, *, first: int, last: int, balanced: bool, told: list[float]) -> None:
    """Every recorded pair was computed; with plans more evenly than the homes alone would have it, else exactly so.

    `told` is the imbalance of each step's updates as veRL reported it: the mean over what the trace says was executed.
    How uneven the homes are is up to the samples, so over all steps together they must be, not in each of them.
    """
    reader = TraceReader(directory)
    infos = [info for info in reader.passes() if first <= info.step <= last]
    assert len(infos) == 6 * (last - first + 1)
    updates: dict[int, list[float]] = {}
    worst_homes = 1.0
    for info in infos:
        record = reader.record(info)
        assert record.executed_MLR is not None and record.home_LE is not None
        executed_MLR = np.asarray(record.executed_MLR)
        if record.name != "ref":
            assert (executed_MLR.sum(axis=2) == record.load_MLSE.sum(axis=(2, 3))).all(), info
            homes_MLR = rank_loads(record.load_MLSE, record.home_LE, ranks=2)
            worst_homes = max(worst_homes, imbalance(homes_MLR).max())
            if balanced:
                assert imbalance(executed_MLR).max() < 1.05, info
            else:
                assert (executed_MLR == homes_MLR).all(), info
        if record.name.startswith("update"):
            updates.setdefault(info.step, []).append(imbalance(executed_MLR).mean())
    assert worst_homes > 1.05
    assert told == pytest.approx([np.mean(updates[step]) for step in sorted(updates)])
