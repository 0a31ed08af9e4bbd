"""Generated traces: exact sums, reproducible, and as skewed as their rung says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foremoe.errors import TraceError
from foremoe.routing import TraceReader
from foremoe.routing.convert import convert_npz_passes
from foremoe.routing.generator import Order, Skew, TraceSpec, generate_layer, inclusion, write_trace
from foremoe.routing.statistics import load_statistics


def test_every_rank_and_micro_step_has_all_its_pairs() -> None:
    spec = TraceSpec(experts=32, ranks=4, micro_steps=5, tokens_per_rank=777, top_k=4, skew=Skew.EXTREME)
    load = generate_layer(spec, step=1, layer=0)
    assert load.shape == (5, 4, 32)
    assert (load.sum(axis=2) == 4 * 777).all()
    assert load.min() >= 0 and load.max() <= 777


def test_layers_and_steps_can_be_drawn_alone_and_again() -> None:
    spec = TraceSpec(experts=16, ranks=2, micro_steps=3, tokens_per_rank=300, top_k=2, seed=4)
    one = generate_layer(spec, step=2, layer=1)
    generate_layer(spec, step=0, layer=0)
    np.testing.assert_array_equal(one, generate_layer(spec, step=2, layer=1))
    assert (one != generate_layer(spec, step=2, layer=2)).any()


def test_the_ladder_rises_and_shuffling_calms_micro_steps() -> None:
    def stats(skew: Skew, order: Order = Order.PROMPT) -> float:
        spec = TraceSpec(experts=128, ranks=32, micro_steps=6, skew=skew, order=order)
        return load_statistics(generate_layer(spec, step=0, layer=0), ranks=32).rank_imbalance

    ladder = [stats(skew) for skew in (Skew.NONE, Skew.MILD, Skew.MEDIUM, Skew.STRONG, Skew.EXTREME)]
    assert ladder == sorted(ladder)
    assert ladder[0] < 1.15 < 1.4 < ladder[1] and 1.7 < ladder[2] < 2.4
    spec = {order: TraceSpec(experts=128, ranks=32, micro_steps=6, order=order) for order in Order}
    correlation = {
        order: load_statistics(generate_layer(one, step=0, layer=0), ranks=32).micro_correlation
        for order, one in spec.items()
    }
    assert correlation[Order.SHUFFLE] > 0.9 > correlation[Order.PROMPT]


def test_inclusion_is_a_distribution_over_distinct_choices() -> None:
    odds = np.random.default_rng(0).normal(0, 3, (50, 16))
    share = inclusion(odds, 4)
    assert share.max() <= 1.0 and share.min() >= 0
    np.testing.assert_allclose(share.sum(axis=1), 4.0, rtol=1e-6)


def test_written_traces_read_back(tmp_path: Path) -> None:
    spec = TraceSpec(experts=16, layers=2, ranks=2, micro_steps=3, tokens_per_rank=200, top_k=2, steps=2)
    seen: list[int] = []
    write_trace(tmp_path / "t", spec, progress=lambda: seen.append(1))
    reader = TraceReader(tmp_path / "t")
    assert [info.step for info in reader.passes()] == [0, 1] and len(seen) == 4
    np.testing.assert_array_equal(reader.load_layer(reader.passes()[1], 1), generate_layer(spec, step=1, layer=1))


@pytest.mark.parametrize("change", [{"experts": 0}, {"top_k": 17, "experts": 16}, {"seed": -1}, {"steps": 0}])
def test_impossible_specs(change: dict[str, int]) -> None:
    with pytest.raises(TraceError):
        TraceSpec(**change)  # type: ignore[arg-type]


def test_converting_recorded_counts(tmp_path: Path) -> None:
    source = tmp_path / "npz"
    source.mkdir()
    load = np.random.default_rng(0).integers(0, 9, (3, 2, 2, 8)).astype(np.int32)
    for number, (name, step) in enumerate([("old_log_prob", 1), ("ref", -1), ("update_0", 1), ("old_log_prob", 2)]):
        np.savez(source / f"actor_{number:04d}.npz", load_MLSE=load, name=name, step=step, home_E=np.arange(8) // 4)
    (source / "notes.npz").write_bytes(b"")
    with pytest.raises(TraceError, match="notes"):
        convert_npz_passes(source, tmp_path / "bad", top_k=2)
    (source / "notes.npz").unlink()
    assert convert_npz_passes(source, tmp_path / "t", top_k=2) == 4
    reader = TraceReader(tmp_path / "t")
    assert [(info.step, info.name) for info in reader.passes()] == [
        (1, "old_log_prob"), (1, "ref"), (1, "update_0"), (2, "old_log_prob"),
    ]  # fmt: skip
    np.testing.assert_array_equal(reader.load(reader.passes()[0]), load)
    with pytest.raises(TraceError, match="no npz file"):
        convert_npz_passes(tmp_path, tmp_path / "none", top_k=2)
