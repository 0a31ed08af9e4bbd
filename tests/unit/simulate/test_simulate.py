"""Simulation of generated and recorded traces, the command line and the report."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from foremoe.cli.simulate import app as simulate_app
from foremoe.cli.trace import app as trace_app
from foremoe.errors import PlannerError, TraceError
from foremoe.planner import PlannerConfig, Strategy
from foremoe.routing import TraceReader, TraceWriter
from foremoe.routing.generator import TraceSpec, write_trace
from foremoe.simulate import Simulation, simulate, write_report
from foremoe.simulate.sources import recut
from foremoe.topology import Topology

RECORDED = Path(__file__).parents[2] / "data" / "grpo_e32"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FAST = PlannerConfig(search_moves=500)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t"
    write_trace(path, TraceSpec(experts=32, layers=2, ranks=8, micro_steps=4, tokens_per_rank=1024, steps=2))
    return path


@pytest.fixture(scope="module")
def result(trace: Path) -> Simulation:
    return simulate(
        TraceReader(trace),
        topology=Topology.uniform(ranks=8, ranks_per_node=4),
        config=FAST,
        strategies=list(Strategy),
    )


def test_figures_are_consistent(result: Simulation) -> None:
    by_name = {entry.strategy: entry for entry in result.results}
    assert all(entry.imbalance_ML.shape == (8, 2) for entry in result.results)
    assert by_name["foremoe"].imbalance_ML.mean() < by_name["eplb"].imbalance_ML.mean()
    assert by_name["foremoe"].total_seconds <= min(entry.total_seconds for entry in result.results) * 1.001
    assert by_name["static"].copies == by_name["static"].moves == 0
    assert by_name["static"].pairs == 8 * 2 * 8 * 8 * 1024
    assert result.ideal_seconds < by_name["static"].total_seconds


def test_recorded_run_at_more_ranks_than_it_had() -> None:
    reader = TraceReader(RECORDED)
    one = simulate(
        reader,
        topology=Topology.uniform(ranks=8, ranks_per_node=8),
        config=FAST.model_copy(update={"redundant_slots": 1}),
        strategies=[Strategy.STATIC, Strategy.FOREMOE],
        passes=reader.passes()[:3],
        layers=2,
    )
    static, foremoe = one.results
    assert static.imbalance_ML.mean() > 1.3
    assert foremoe.imbalance_ML.mean() <= static.imbalance_ML.mean()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 24])
def test_recut_keeps_totals(ranks: int) -> None:
    load = np.random.default_rng(0).integers(0, 50, (3, 8, 6)).astype(np.int32)
    cut = recut(load, ranks)
    assert cut.shape == (3, ranks, 6)
    np.testing.assert_array_equal(cut.sum(axis=1), load.sum(axis=1))


def test_sources_that_do_not_map(trace: Path) -> None:
    with pytest.raises(TraceError, match="do not map"):
        recut(np.zeros((1, 8, 6), dtype=np.int32), 6)
    with pytest.raises(PlannerError, match="do not divide"):
        simulate(
            TraceReader(trace),
            topology=Topology.uniform(ranks=64, ranks_per_node=8),
            config=FAST,
            strategies=[Strategy.STATIC],
        )


def test_empty_trace_is_refused(tmp_path: Path) -> None:
    spec = TraceSpec(experts=8, layers=1, ranks=2)
    TraceWriter(tmp_path / "t", spec.meta)
    with pytest.raises(TraceError, match="no complete pass"):
        simulate(
            TraceReader(tmp_path / "t"),
            topology=Topology.uniform(ranks=2, ranks_per_node=2),
            config=FAST,
            strategies=[Strategy.STATIC],
        )


def test_command_line(trace: Path, tmp_path: Path) -> None:
    topology = tmp_path / "topology.json"
    topology.write_text(Topology.uniform(ranks=8, ranks_per_node=4).model_dump_json(by_alias=True))
    report = tmp_path / "report.html"
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps({"searchMoves": 500}))
    arguments = [str(trace), "--topology", str(topology), "--config", str(settings), "--strategies", "static,foremoe"]
    done = CliRunner().invoke(simulate_app, [*arguments, "--report", str(report), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    printed = json.loads(done.stdout)
    assert printed["timesAre"] == "modelled"
    assert [row["strategy"] for row in printed["strategies"]] == ["static", "foremoe"]
    assert "<svg" in report.read_text()
    table = CliRunner().invoke(simulate_app, arguments, catch_exceptions=False)
    assert "Times are modelled" in table.stdout
    with pytest.raises(PlannerError, match="choose from"):
        CliRunner().invoke(simulate_app, [str(trace), "--strategies", "magic"], catch_exceptions=False)


def test_trace_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    options = [
        "--experts",
        "16",
        "--layers",
        "2",
        "--ranks",
        "4",
        "--top-k",
        "2",
        "--micro-steps",
        "3",
        "--tokens",
        "200",
    ]
    done = runner.invoke(trace_app, ["generate", str(tmp_path / "t"), *options], catch_exceptions=False)
    assert done.exit_code == 0 and "16 experts" in done.stdout
    info = runner.invoke(trace_app, ["info", str(tmp_path / "t"), "--json"], catch_exceptions=False)
    shown = json.loads(info.stdout)
    assert shown["meta"]["experts"] == 16 and len(shown["passes"]) == 2
    assert "Gini" in runner.invoke(trace_app, ["info", str(tmp_path / "t")], catch_exceptions=False).stdout


def test_report_needs_nothing_from_outside(result: Simulation, tmp_path: Path) -> None:
    write_report(result, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "http://" not in text and "https://" not in text and "<script" not in text and "url(" not in text
    assert "Times are modelled" in text
    with pytest.raises(TraceError, match="cannot write"):
        write_report(result, tmp_path / "absent" / "r.html")


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian package chromium)")
def test_report_in_a_browser(result: Simulation, tmp_path: Path) -> None:
    report = tmp_path / "r.html"
    write_report(result, report)
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,2600",
    ]  # fmt: skip
    command = [str(CHROMIUM), *flags]
    dom = subprocess.run(
        [*command, "--dump-dom", report.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    for kind in ("imbalance", "time", "heatmap"):
        assert f'data-chart="{kind}"' in dom.stdout
    assert dom.stdout.count("<polyline") == len(result.results)
    shot = tmp_path / "r.png"
    subprocess.run([*command, f"--screenshot={shot}", report.as_uri()], capture_output=True, timeout=240, check=True)
    assert shot.stat().st_size > 20_000
