"""Routing capture over two ranks: counts equal a direct count, filler is left out, the trace has every step once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foremoe.planner import BasePlacement
from foremoe.routing import TraceReader, rank_imbalance
from tests.distributed.launch import Pools
from tests.distributed.verl_capture_cases import EXPERTS, capture

pytestmark = pytest.mark.distributed

Answer = dict[str, Any]


def run(pools: Pools, directory: Path, **arguments: Any) -> list[Answer]:
    settings: dict[str, Any] = {"group_size": 2, "first_step": 1, "steps": 2, "seed": 5} | arguments
    answers: list[Answer] = pools(2).run(capture, directory=str(directory), **settings)
    return answers


def test_captured_counts_are_those_of_a_direct_count_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    answers = run(pools, tmp_path / "trace")
    for key in answers[0]["direct"]:
        expected = np.stack([answer["direct"][key] for answer in answers], axis=2)
        for answer in answers:
            np.testing.assert_array_equal(answer["captured"][key], expected)


def test_the_trace_holds_them(pools: Pools, tmp_path: Path) -> None:
    answers = run(pools, tmp_path / "trace")
    reader = TraceReader(tmp_path / "trace")
    assert [(info.step, info.name) for info in reader.passes()] == list(answers[0]["direct"])
    for info in reader.passes():
        np.testing.assert_array_equal(reader.load(info), answers[0]["captured"][info.step, info.name])
        home_LE = reader.home(info)
        assert home_LE is not None and home_LE[0].tolist() == [0] * 4 + [1] * 4


def test_the_reported_balance_is_that_of_the_step(pools: Pools, tmp_path: Path) -> None:
    first, second = run(pools, tmp_path / "trace", steps=1)
    base = BasePlacement.contiguous(experts=EXPERTS, ranks=2)
    values = np.concatenate([rank_imbalance(load, base).ravel() for load in first["captured"].values()])
    last = first["events"][-1]
    assert last["mean"] == pytest.approx(values.mean()) and last["max"] == pytest.approx(values.max())
    assert second["events"] == []


def test_a_resumed_run_has_every_step_once(pools: Pools, tmp_path: Path) -> None:
    run(pools, tmp_path / "trace", steps=4)
    resumed = run(pools, tmp_path / "trace", first_step=3, steps=1, seed=6)
    reader = TraceReader(tmp_path / "trace")
    passes = [(info.step, info.name) for info in reader.passes()]
    assert passes == [(step, name) for step in (1, 2, 3) for name in ("old_log_prob", "update_0")]
    np.testing.assert_array_equal(reader.load(reader.passes()[-1]), resumed[0]["captured"][3, "update_0"])


def test_groups_write_passes_of_their_own_names(pools: Pools, tmp_path: Path) -> None:
    answers = run(pools, tmp_path / "trace", group_size=1, steps=1)
    reader = TraceReader(tmp_path / "trace")
    names = sorted(info.name for info in reader.passes())
    assert names == ["old_log_prob", "old_log_prob.g1", "update_0", "update_0.g1"]
    loads = {info.name: reader.load(info)[:, :, 0] for info in reader.passes()}
    np.testing.assert_array_equal(loads["update_0"], answers[0]["direct"][1, "update_0"])
    np.testing.assert_array_equal(loads["update_0.g1"], answers[1]["direct"][1, "update_0"])


def test_a_rank_without_a_record_counts_nothing_and_holds_nobody_up(pools: Pools, tmp_path: Path) -> None:
    answers = run(pools, tmp_path / "trace", recorded_ranks=(1,), steps=1)
    load = answers[0]["captured"][1, "old_log_prob"]
    assert load[:, :, 0].sum() == 0
    np.testing.assert_array_equal(load[:, :, 1], answers[1]["direct"][1, "old_log_prob"])


def test_without_any_record_there_is_no_trace(pools: Pools, tmp_path: Path) -> None:
    answers = run(pools, tmp_path / "trace", recorded_ranks=(), steps=1)
    assert answers[0]["captured"] == {(1, "old_log_prob"): None, (1, "update_0"): None}
    assert not (tmp_path / "trace").exists()
