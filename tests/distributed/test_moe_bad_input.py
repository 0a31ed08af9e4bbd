"""Bad input ends in an error of our own tree on every rank, or in right numbers; never in a crash or a hang."""

from __future__ import annotations

import pytest

from tests.distributed import moe_bad_input_cases as cases
from tests.distributed.launch import Pools, pool_of

pytestmark = pytest.mark.distributed


def test_refused_records_name_the_place_on_every_rank(pools: Pools) -> None:
    first, second = pools(2).run(cases.bad_records)
    assert first == second
    assert {error["kind"] for error in first.values()} == {"RoutingError"}
    assert (first["out of range"]["layer"], first["out of range"]["expert"], first["out of range"]["rank"]) == (1, 8, 1)
    assert (first["below"]["layer"], first["below"]["expert"], first["below"]["rank"]) == (2, -3, 1)
    assert "micro-step 1, token 2" in first["out of range"]["text"]
    for name in ("more layers", "fewer layers", "other top-k", "floats", "not a tensor", "two dimensions"):
        assert first[name]["rank"] == 1, name
    assert "3 MoE layers" in first["more layers"]["text"]
    assert "routes to 2" in first["other top-k"]["text"]
    assert first["no micro-step"]["rank"] == 1
    assert "zero rows" in first["no micro-step"]["text"]


@pytest.mark.parametrize("cut", [1, 4, 100])
def test_a_record_shorter_than_the_tokens_routes_the_rest_live(pools: Pools, cut: int) -> None:
    result = pools(2).run(cases.record_lengths, cut=cut)[0]
    assert result["this"]["as_planned"]
    assert result["this"]["live_rows"] == min(cut, 6) * 3
    assert not result["next"]["fell_back"]


@pytest.mark.parametrize("cut", [-1, -20])
def test_a_record_longer_than_the_tokens_runs_without_a_plan(pools: Pools, cut: int) -> None:
    result = pools(2).run(cases.record_lengths, cut=cut)[0]
    assert result["this"]["unplanned"] == (0,)
    assert result["this"]["planned"][0] != result["this"]["executed"][0]
    assert not result["this"]["as_planned"]
    assert not result["next"]["fell_back"]


def test_repeated_ids_are_no_record(pools: Pools) -> None:
    report = pools(2).run(cases.repeated_ids)[0]
    assert report["live_rows"] == 2 * 3
    assert report["as_planned"]


def test_weights_that_are_not_finite_are_reported(pools: Pools) -> None:
    first, second = pools(2).run(cases.nan_weights)
    # Everything behind the first bad layer is NaN too.
    assert first["nonfinite"] == second["nonfinite"] == (1, 2)


def test_corrupted_record_is_reported_and_all_ranks_fall_back_together(pools: Pools) -> None:
    first, second = pools(2).run(cases.corrupted_memory)
    for reports in (first, second):
        assert not reports[0]["as_planned"]
        assert "micro-step 0, layer 2, expert" in reports[0]["mismatches"][0]
        assert "rank 1" in reports[0]["mismatches"][0]
        assert [report["fell_back"] for report in reports] == [False, True, False]
        assert reports[2]["as_planned"]
    assert first[0]["mismatches"] == second[0]["mismatches"]


def test_ranks_with_different_settings(pools: Pools) -> None:
    for found in pools(2).run(cases.settings_differ):
        words = {"config": "planner settings", "topology": "topology", "model": "model", "base": "base placement"}
        for name, word in words.items():
            assert found[name]["kind"] == "PlannerError"
            assert found[name]["rank"] == 1
            assert word in found[name]["text"], name


def test_unsuitable_models_and_groups(pools: Pools) -> None:
    for found in pools(2).run(cases.unsuitable):
        assert {error["kind"] for error in found.values()} == {"PlannerError"}
        for name, words in {
            "dense": "known: deepseek_v3, mixtral, olmoe, qwen3_moe",
            "no config": "is no MoE model",
            "layout": "packed layout",
            "no MoE layer": "no MoE layer",
            "does not divide": "do not divide",
            "topology size": "3 ranks",
            "base size": "base placement",
            "twice": "distributed already",
            "other layers moved": "2 placements for 3 layers",
        }.items():
            assert words in found[name]["text"], name


@pytest.mark.parametrize(("how", "victim", "backward"), [("dies", 0, True), ("sleeps", 2, False)])
def test_a_lost_peer_is_named_on_every_other_rank(how: str, victim: int, backward: bool) -> None:
    others = {0, 1, 2} - {victim}
    with pool_of(3) as pool:
        answers = pool.run_each(
            cases.peer_lost, ranks=others, seconds=100, how=how, victim=victim, backward=backward
        )  # fmt: skip
    for rank in others:
        found = answers[rank]
        assert isinstance(found, dict), found
        assert found["kind"] == "TransferError"
        assert found["rank"] == victim, found
        assert f"rank {victim} of 3 died or stopped answering" in found["text"]
        # Nor does giving up the step wait for the lost one longer than the group's timeout.
        assert (found["abandoning"]["kind"], found["abandoning"]["rank"]) == ("TransferError", victim)
