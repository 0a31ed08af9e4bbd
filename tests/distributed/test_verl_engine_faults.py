from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foremoe.routing import TraceReader
from tests.distributed.launch import Pools
from tests.distributed.verl_batches import EXPERTS, make_dense_directory, make_model_directory
from tests.distributed.verl_fault_cases import (
    accumulation,
    chosen_engine,
    corrupted,
    executed_otherwise,
    reference,
    trace,
)

# The first case of a pool imports veRL on every rank, which takes long on a busy machine.
SECONDS = 400
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("out of range", ["outside [0, 8)", "layer 2", "expert 77", "(rank 1)"]),
        ("twice", ["names an expert twice", "layer 2", "expert ", "(rank 1)"]),
        ("short", ["rows for", "(rank 1)"]),
    ],
)
def test_a_corrupted_record_on_one_rank_lets_all_ranks_route_live(
    pools: Pools, model: str, fault: str, said: list[str]
) -> None:
    answers = pools(2).run(corrupted, seconds=SECONDS, directory=model, fault=fault)
    for answer in answers:
        assert answer["gradient"][0] < 1e-5
        assert answer["parameter"][0] < 1e-4
        # The pass after it trusts its record again, but for the one sample that has none.
        assert answer["live_rows"][0] > 2 * answer["next"][0] > 0
    [message] = answers[0]["messages"]
    assert all(words in message for words in [*said, "step 1, pass update_1", "drop the record of this pass"])
    assert answers[1]["messages"] == []


def test_a_pass_that_did_not_execute_its_plan_is_named_and_the_next_one_is_live_on_all_ranks(
    pools: Pools, model: str
) -> None:
    answers = pools(2).run(executed_otherwise, seconds=SECONDS, directory=model)
    for answer in answers:
        [said] = [text for text in answer["noticed"] if "the next step routes live" in text]
        assert "micro-step 0, layer 1, expert " in said
        assert "rank 1" in said
        assert any("routing of this step is live" in text for text in answer["messages"])
        assert answer["gradient"][0] < 1e-5
        assert answer["gradient after"][0] < 1e-5
        assert answer["as planned after"] == [1.0]
    assert any("pass old_log_prob was not executed as planned" in text for text in answers[0]["noticed"])


def test_a_reference_model_routes_live_whatever_the_record_says(pools: Pools, model: str) -> None:
    for answer in pools(2).run(reference, seconds=SECONDS, directory=model):
        assert answer["engine"] == "ExpertParallelEngine"
        assert answer["difference"] < 1e-5


@pytest.mark.parametrize("world", [2, 4])
def test_passes_without_an_optimizer_step_between_them_add_up(pools: Pools, model: str, world: int) -> None:
    for worst in pools(world).run(accumulation, seconds=SECONDS, directory=model, expert_parallel=2):
        assert worst[0] < 1e-5, worst


def test_the_trace_holds_what_was_executed_and_the_balance_is_reported(
    pools: Pools, model: str, tmp_path: Path
) -> None:
    answers = pools(2).run(trace, seconds=SECONDS, directory=model, trace_directory=str(tmp_path / "trace"))
    reader = TraceReader(tmp_path / "trace")
    records = {info.name: reader.record(info) for info in reader.passes()}
    assert set(records) == {"old_log_prob", "ref", "update_0", "update_1"}
    for name, record in records.items():
        assert record.executed_MLR is not None
        live = record.executed_MLR.sum(axis=2) - record.load_MLSE.sum(axis=(2, 3))
        assert (live >= 0).all()
        if name != "ref":
            # All but the sample without a record was replayed: micro-step 1 of each pass holds it.
            assert (live[[0, 2]] == 0).all()
            assert record.load_MLSE.shape[-1] == EXPERTS
    last = answers[0][-1]
    assert last["kind"] == "balance"
    assert last["as_planned"] is True
    assert 1.0 <= last["planned"] <= last["executed"] <= last["mean"] + 0.5
    assert last["copies"] > 0
    assert np.isfinite(last["exposed_seconds"])
    assert answers[1] == []


def test_models_and_settings_without_experts_to_spread_keep_verls_engine(
    pools: Pools, model: str, tmp_path: Path
) -> None:
    dense = make_dense_directory(tmp_path / "dense")
    assert pools(2).run(chosen_engine, seconds=SECONDS, directory=dense) == [("ForeMoEEngine", True)] * 2
    assert (
        pools(2).run(chosen_engine, seconds=SECONDS, directory=model, expert_parallel=1)
        == [("ForeMoEEngine", True)] * 2
    )
    assert pools(2).run(chosen_engine, seconds=SECONDS, directory=model) == [("ExpertParallelEngine", True)] * 2


def test_settings_that_do_not_fit_are_named(pools: Pools, model: str, tmp_path: Path) -> None:
    for text, _ in pools(2).run(chosen_engine, seconds=SECONDS, directory=model, expert_parallel=3):
        assert text.startswith("LaunchError")
        assert "3 does not divide the 2 ranks" in text
    for text, _ in pools(2).run(chosen_engine, seconds=SECONDS, directory=model, planner='{"redundantSlots": -1}'):
        assert text.startswith("PlannerError")
        assert "redundant" in text
    for text, _ in pools(2).run(
        chosen_engine, seconds=SECONDS, directory=model, planner=str(tmp_path / "nowhere.json")
    ):
        assert text.startswith("LaunchError")
        assert "FOREMOE_PLANNER_CONFIG" in text
