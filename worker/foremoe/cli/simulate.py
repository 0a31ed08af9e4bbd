"""`foremoe simulate`: compare balancing strategies over a trace."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from foremoe.errors import PlannerError
from foremoe.planner import PlannerConfig, Strategy
from foremoe.routing import TraceReader
from foremoe.simulate import Simulation, simulate, write_report
from foremoe.simulate.report import constants_of
from foremoe.topology import Topology

app = typer.Typer(rich_markup_mode=None)


@app.command(help="Compare balancing strategies over a routing trace; balance is exact, times are modelled.")
def main(
    trace: Path = typer.Argument(help="Directory of the trace."),
    topology: Path = typer.Option(None, help="Topology as JSON; default: nodes of --ranks-per-node ranks."),
    ranks: int = typer.Option(0, help="Ranks without --topology (default: the trace's source ranks)."),
    ranks_per_node: int = typer.Option(8, help="Ranks of a node without --topology."),
    config: Path = typer.Option(None, help="Planner settings as JSON; the options below override it."),
    strategies: str = typer.Option("static,eplb,lplb,relibra,foremoe", help="Strategies to compare, by comma."),
    redundant_slots: int = typer.Option(None, help="Replica slots of a rank and layer, filled per step."),
    dynamic_slots: int = typer.Option(None, help="Replica slots of a rank shared by all layers."),
    tolerance: float = typer.Option(None, help="Imbalance above 1.0 that needs no copies."),
    max_moves: int = typer.Option(None, help="Experts of a layer that may change home per step; -1 = what pays."),
    layers: int = typer.Option(None, help="Only the first layers."),
    passes: int = typer.Option(None, help="Only the first passes."),
    report: Path = typer.Option(None, help="Write an HTML report."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Replay a trace under several strategies and print what each would have cost."""
    reader = TraceReader(trace)
    chosen = _strategies(strategies)
    settings = _settings(config, redundant_slots, dynamic_slots, tolerance, max_moves)
    machine = _topology(topology, ranks or reader.meta.source_ranks, ranks_per_node)
    selected = reader.passes()[:passes]
    count = min(reader.meta.layers, layers or reader.meta.layers)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("planning", total=len(chosen) * len(selected) * count)
        result = simulate(
            reader,
            topology=machine,
            config=settings,
            strategies=chosen,
            passes=selected,
            layers=count,
            progress=lambda: progress.advance(task),
        )
    if report is not None:
        write_report(result, report)
        console.print(f"report: {report}", highlight=False)
    if as_json:
        typer.echo(json.dumps(_json(result), indent=2))
    else:
        _print(result)


def _strategies(text: str) -> list[Strategy]:
    known = [str(strategy) for strategy in Strategy]
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise PlannerError(f"unknown strategies {unknown}; choose from {', '.join(known)}")
    return [Strategy(name) for name in dict.fromkeys(names)]


def _settings(
    path: Path | None,
    redundant_slots: int | None,
    dynamic_slots: int | None,
    tolerance: float | None,
    max_moves: int | None,
) -> PlannerConfig:
    base = PlannerConfig(max_moves=None) if path is None else PlannerConfig.checked(_read(path))
    given: dict[str, object] = {
        "redundant_slots": redundant_slots,
        "dynamic_slots": dynamic_slots,
        "tolerance": tolerance,
    }
    update = {key: value for key, value in given.items() if value is not None}
    if max_moves is not None:
        update["max_moves"] = None if max_moves < 0 else max_moves
    return PlannerConfig.checked({**base.model_dump(), **update})


def _topology(path: Path | None, ranks: int, ranks_per_node: int) -> Topology:
    if path is not None:
        return Topology.checked(_read(path))
    return Topology.uniform(ranks=ranks, ranks_per_node=min(ranks, ranks_per_node))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PlannerError(f"cannot read {path}: {error}") from error


def _json(result: Simulation) -> dict[str, object]:
    return {
        "trace": result.trace,
        "passes": len(result.passes),
        "microSteps": sum(result.micro_steps),
        "layers": result.layers,
        "ranks": result.topology.size,
        "timesAre": "modelled",
        "constants": constants_of(result),
        "forcedBalanceSeconds": result.ideal_seconds,
        "strategies": [entry.summary() for entry in result.results],
    }


def _print(result: Simulation) -> None:
    table = Table(
        title=f"{sum(result.micro_steps)} micro-steps, {result.layers} layers, {result.topology.size} ranks "
        f"on {result.topology.nodes} nodes"
    )
    for heading in (
        "strategy", "max/mean", "p95", "max", "copies", "moves", "between nodes", "modelled s", "of ideal",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for entry in result.results:
        row = entry.summary()
        share = 100 * result.ideal_seconds / entry.total_seconds if entry.total_seconds else 100.0
        table.add_row(
            entry.strategy,
            f"{row['imbalance_mean']:.4f}",
            f"{row['imbalance_p95']:.4f}",
            f"{row['imbalance_max']:.4f}",
            f"{row['copies_per_micro_step_and_layer']:.2f}",
            str(entry.moves),
            f"{row['cross_node_share']:.1%}",
            f"{entry.total_seconds:.4g}",
            f"{share:.1f} %",
        )
    console = _console()
    console.print(table)
    facts = ", ".join(f"{name} {value}" for name, value in constants_of(result).items())
    console.print(f"Copies are per layer and micro-step. Times are modelled, with: {facts}.", highlight=False)


def _console() -> Console:
    """Standard output; piped output is not squeezed into 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
