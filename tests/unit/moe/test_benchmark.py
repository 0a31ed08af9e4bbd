from __future__ import annotations

import numpy as np
import pytest
import torch

from foremoe.cli.bench import _check
from foremoe.errors import LaunchError
from foremoe.moe.benchmark import BenchmarkSettings, Measurement, even_routing, skewed_routing
from foremoe.moe.benchmark_table import findings, to_json, variant_rows


def loads(routing: torch.Tensor, experts: int) -> np.ndarray:
    return np.bincount(routing.numpy().ravel(), minlength=experts)


@pytest.mark.parametrize("ranks", [2, 4])
def test_routing_has_the_wanted_imbalance_and_distinct_ids(ranks: int) -> None:
    settings = BenchmarkSettings(experts=16, top_k=4, tokens=500, imbalance=1.6)
    total = np.zeros((settings.layers, 16))
    for source in range(ranks):
        for record in skewed_routing(settings, ranks=ranks, source=source, step=3):
            assert record.shape == (500, 2, 4)
            assert all(len(set(row)) == 4 for row in record.reshape(-1, 4).tolist())
            for layer in range(settings.layers):
                total[layer] += loads(record[:, layer], 16)
    rank_loads = total.reshape(settings.layers, ranks, -1).sum(axis=2)
    assert np.allclose(rank_loads.max(axis=1) / rank_loads.mean(axis=1), 1.6, atol=0.01)
    assert (rank_loads.argmax(axis=1) == 0).all()


def test_even_routing_is_exactly_balanced() -> None:
    settings = BenchmarkSettings(tokens=512)
    for record in even_routing(settings, ranks=2, source=1, step=2):
        assert len(set(loads(record[:, 0], 8))) == 1
        assert all(len(set(row)) == 4 for row in record.reshape(-1, 4).tolist())


def run(variant: str, seconds: float) -> Measurement:
    return Measurement(
        variant=variant, wall_seconds=seconds, cpu_seconds=seconds, plan_seconds=0.001, exposed_seconds=0.0,
        dynamic_exposed_seconds=0.0, hidden_seconds=0.0, imbalance=1.0, copies=2, replica_bytes=10, as_planned=True,
    )  # fmt: skip


def test_findings_judge_against_the_bars() -> None:
    runs = [run(v, s) for v, s in (("forced", 0.98), ("even", 1.0), ("static", 1.6), ("eplb", 1.2), ("foremoe", 1.0))]
    settings = BenchmarkSettings()
    assert all(finding.met for finding in findings(runs, settings, "cpu_seconds"))
    slow = [run("foremoe", 1.3) if each.variant == "foremoe" else each for each in runs]
    met = [finding.met for finding in findings(slow, settings, "cpu_seconds")]
    assert met[:3] == [False, False, False]
    assert len(variant_rows(runs)) == 5
    assert to_json(runs, settings, findings(runs, settings, "cpu_seconds"), machine="x")["machine"] == "x"


def test_impossible_sizes_are_refused_before_a_process_starts() -> None:
    _check(BenchmarkSettings(), 2)
    with pytest.raises(LaunchError, match="divide"):
        _check(BenchmarkSettings(), 3)
    with pytest.raises(LaunchError, match="cannot take"):
        _check(BenchmarkSettings(imbalance=3.9), 4)
