"""`foremoe trace`: generate, inspect and convert routing traces."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from foremoe.routing import TraceReader
from foremoe.routing.convert import convert_npz_passes
from foremoe.routing.generator import Order, Skew, TraceSpec, write_trace
from foremoe.routing.statistics import load_statistics

app = typer.Typer(no_args_is_help=True, help="Generate, inspect and convert routing traces.", rich_markup_mode=None)


@app.command()
def generate(
    path: Path = typer.Argument(help="Directory of the new trace; an existing trace is replaced."),
    experts: int = typer.Option(128, help="Experts of a layer."),
    layers: int = typer.Option(4, help="MoE layers."),
    ranks: int = typer.Option(8, help="Source ranks (size of the expert-parallel group)."),
    top_k: int = typer.Option(8, help="Experts a token."),
    micro_steps: int = typer.Option(16, help="Micro-steps of a step."),
    tokens: int = typer.Option(4096, help="Tokens of a rank in a micro-step."),
    steps: int = typer.Option(2, help="RL steps."),
    skew: Skew = typer.Option(Skew.MEDIUM, help="How unevenly experts are chosen."),
    order: Order = typer.Option(Order.PROMPT, help="Responses of a prompt side by side, or shuffled."),
    seed: int = typer.Option(0, help="Equal seeds give equal traces."),
) -> None:
    """Generate a synthetic trace, deterministic by seed."""
    spec = TraceSpec(
        experts=experts,
        layers=layers,
        ranks=ranks,
        top_k=top_k,
        micro_steps=micro_steps,
        tokens_per_rank=tokens,
        steps=steps,
        skew=skew,
        order=order,
        seed=seed,
    )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("generating layers", total=steps * layers)
        write_trace(path, spec, progress=lambda: progress.advance(task))
    typer.echo(f"{path}: {steps} steps, {layers} layers, {experts} experts, {ranks} source ranks, {skew} skew")


@app.command()
def info(
    path: Path = typer.Argument(help="Directory of the trace."),
    ranks: int = typer.Option(0, help="Ranks to report rank imbalance for (default: the trace's source ranks)."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what a trace holds and how skewed it is."""
    reader = TraceReader(path)
    rows = []
    for entry in reader.passes():
        stats = [load_statistics(load, ranks=ranks or reader.meta.source_ranks) for load in reader.layers(entry)]
        mean = {key: sum(asdict(one)[key] for one in stats) / len(stats) for key in asdict(stats[0])}
        rows.append({"step": entry.step, "pass": entry.name, "micro_steps": reader.micro_steps(entry), **mean})
    if as_json:
        typer.echo(json.dumps({"meta": asdict(reader.meta), "passes": rows}, indent=2))
        return
    meta = reader.meta
    typer.echo(
        f"{path}: {meta.model or 'unnamed model'}, {meta.experts} experts, {meta.layers} layers, "
        f"top-{meta.top_k}, {meta.source_ranks} source ranks, {len(rows)} passes"
    )
    table = Table(title="Mean over layers; imbalance is max/mean with contiguous homes")
    for heading in ("step", "pass", "micro-steps", "Gini", "expert step", "expert micro", "rank", "rank p95", "corr."):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = list(row.values())
        table.add_row(*[str(value) for value in figures[:3]], *[f"{value:.2f}" for value in figures[3:]])
    _console().print(table)


@app.command()
def convert(
    source: Path = typer.Argument(help="Directory of npz files with load_MLSE, one per pass."),
    path: Path = typer.Argument(help="Directory of the new trace."),
    top_k: int = typer.Option(..., help="Experts a token of the recorded model."),
    model: str = typer.Option("", help="Name of the recorded model."),
) -> None:
    """Turn recorded counts (one npz per pass) into a trace."""
    typer.echo(f"{path}: {convert_npz_passes(source, path, top_k=top_k, model=model)} passes")


def _console() -> Console:
    """Standard output; piped output is not squeezed into 80 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
