"""`foremoe run` on the example: the whole job as local processes, with assertions on what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from foremoe.routing import TraceReader
from foremoe_operator.api.progress import Progress

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo-tiny-moe.yaml"
STEPS = 2


def foremoe(*arguments: str, directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from foremoe.cli.main import main; main()", *arguments]
    return subprocess.Popen(
        command, cwd=directory, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(process: subprocess.Popen[str], *, seconds: float) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=90)
    return process.returncode, output


def left_behind(directory: Path) -> list[str]:
    """Command lines of processes that work below `directory`; a run must leave none."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if str(process.info["cwd"] or "").startswith(str(directory)):
            found.append(" ".join(process.info["cmdline"] or []))
    return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("run")
    volume = directory / ".foremoe" / "volumes" / "foremoe-demo"
    for arguments in (
        ("data", "create", str(volume / "data")),
        ("model", "create", str(volume / "model"), "--warmup-steps", "5"),
    ):
        code, output = finish(foremoe(*arguments, directory=directory), seconds=600)
        assert code == 0, output
    yield directory
    assert left_behind(directory) == []


def test_a_job_runs_to_its_end(workplace: Path) -> None:
    run = foremoe("run", str(EXAMPLE), "--steps", str(STEPS), directory=workplace)
    code, output = finish(run, seconds=600)
    logs = workplace / ".foremoe" / "runs" / "grpo-tiny-moe"
    assert code == 0, f"{output}\n{(logs / 'head' / 'log').read_text()[-8000:]}"

    progress = Progress.model_validate_json((logs / "head" / "termination.json").read_bytes())
    assert progress.step == progress.total_steps == STEPS
    assert progress.exit_code == 0 and progress.problem is None
    assert progress.reward is not None and progress.first_step_time is not None
    assert progress.balance is not None and 1.0 <= progress.balance.mean <= progress.balance.max <= 2.0

    volume = workplace / ".foremoe" / "volumes" / "foremoe-demo"
    assert progress.checkpoint is not None and progress.checkpoint.step == STEPS
    actor = Path(progress.checkpoint.path) / "actor"
    assert {file.name for file in actor.glob("model_world_size_2_rank_*.pt")} == {
        "model_world_size_2_rank_0.pt",
        "model_world_size_2_rank_1.pt",
    }
    check_trace(volume / "traces" / "grpo-tiny-moe")


def check_trace(directory: Path) -> None:
    reader = TraceReader(directory)
    assert (reader.meta.experts, reader.meta.layers, reader.meta.source_ranks, reader.meta.top_k) == (16, 4, 2, 4)
    passes = reader.passes()
    updates = [f"update_{number}" for number in range(4)]
    assert [(info.step, info.name) for info in passes] == [
        (step, name) for step in range(1, STEPS + 1) for name in ("old_log_prob", "ref", *updates)
    ]
    for step in range(1, STEPS + 1):
        loads = {info.name: reader.load(info) for info in passes if info.step == step}
        rows = loads["old_log_prob"].sum(axis=(0, 2, 3)) // reader.meta.top_k
        # 256 samples of at least 18 tokens, of which the last is never routed; every layer sees every token.
        assert (rows == rows[0]).all() and rows[0] > 256 * 15
        # The reference and the four updates together see the tokens that the recompute saw.
        assert (loads["ref"].sum(axis=(0, 2)) == loads["old_log_prob"].sum(axis=(0, 2))).all()
        assert (sum(loads[name].sum(axis=(0, 2)) for name in updates) == loads["ref"].sum(axis=(0, 2))).all()


def test_an_interrupted_run_leaves_nothing(workplace: Path) -> None:
    # A directory of its own: the log of an earlier run would say too early that the driver runs.
    run = foremoe("run", str(EXAMPLE), "--steps", "50", "--log-directory", "interrupted", directory=workplace)
    logs = workplace / "interrupted" / "grpo-tiny-moe"
    deadline = time.monotonic() + 600
    while "the driver runs" not in _text(logs / "head" / "log") and time.monotonic() < deadline:
        assert run.poll() is None
        time.sleep(0.5)
    os.kill(run.pid, signal.SIGINT)
    code, output = finish(run, seconds=120)
    assert code == 128 + signal.SIGINT, output
    assert left_behind(workplace) == []


def test_missing_input_is_said_at_once_with_the_commands(tmp_path: Path) -> None:
    code, output = finish(foremoe("run", str(EXAMPLE), directory=tmp_path), seconds=60)
    assert code == 2
    assert "foremoe model create" in output and "foremoe data create" in output


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
