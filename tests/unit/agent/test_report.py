"""The termination message."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from foremoe.agent import report
from foremoe_operator.api.constants import TERMINATION_MAX_BYTES, Reason
from foremoe_operator.api.progress import Problem, Progress


@given(st.lists(st.text(max_size=2000), max_size=80))
def test_any_log_fits_and_reads_back(lines: list[str]) -> None:
    progress = Progress(step=3, exit_code=1, log_tail="\n".join(lines))
    data = report.render(progress)
    assert len(data) <= TERMINATION_MAX_BYTES
    assert Progress.model_validate_json(data).step == 3


def test_the_last_lines_are_kept() -> None:
    progress = Progress(log_tail="\n".join(f"line {number} {'x' * 200}" for number in range(100)))
    kept = Progress.model_validate_json(report.render(progress)).log_tail.splitlines()
    assert kept[-1].startswith("line 99 ") and len(kept) > 10


def test_a_long_problem_still_fits() -> None:
    problem = Problem(reason=Reason.BOOT_FAILED, message="\x01" * 600)
    data = report.render(Progress(problem=problem, log_tail="y" * 5000))
    assert len(data) <= TERMINATION_MAX_BYTES


def test_terminal_escapes_are_dropped() -> None:
    assert report.clean(["\x1b[31mred\x1b[0m text\r"]) == ["red text"]


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    report.write(tmp_path / "missing" / "file", Progress())
