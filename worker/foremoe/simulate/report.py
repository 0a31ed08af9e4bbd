"""The HTML report of a simulation: one file that needs nothing else."""

from __future__ import annotations

from pathlib import Path

import jinja2

from foremoe.errors import TraceError
from foremoe.simulate import charts
from foremoe.simulate.run import CAUSES, Simulation

_MOST_COLUMNS = 256
"""A heat map of more micro-steps than this shows the first ones only."""


def constants_of(simulation: Simulation) -> dict[str, str]:
    """Every constant the modelled times rest on, with units."""
    cost, topology = simulation.config.cost, simulation.topology
    shape = cost.model
    return {
        "GPU": str(cost.gpu),
        "sustained compute": f"{cost.flops_per_second / 1e12:.1f} TFLOP/s ({cost.utilisation:.0%} of the bf16 peak)",
        "link inside an NVLink domain": f"{topology.domain_bytes_per_second / 1e9:.1f} GB/s a GPU",
        "link between domains": f"{topology.network_bytes_per_second / 1e9:.1f} GB/s a GPU",
        "hidden and expert width": f"{shape.hidden}, {shape.expert_width}",
        "experts a token": str(shape.top_k),
        "mean context of attention": f"{cost.mean_context} tokens",
        "dispatch and combine hidden": f"{cost.exchange_overlap:.0%}",
        "compute that hides expert transfers": f"{cost.copy_overlap:.0%}",
    }


def render_report(simulation: Simulation) -> str:
    """The report as HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("foremoe.simulate", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    rows = [result.summary() for result in simulation.results]
    high = max(float(result.imbalance_ML.max()) for result in simulation.results)
    return environment.get_template("report.html.j2").render(
        simulation=simulation,
        rows=rows,
        colours=charts.COLOURS,
        cause_colours=charts.CAUSE_COLOURS,
        cause_labels=charts.CAUSE_LABELS,
        heat_high=high,
        lines=charts.lines(
            {result.strategy: result.imbalance_ML.mean(axis=1) for result in simulation.results},
            label="Imbalance over micro-steps, one line per strategy",
            x_label="micro-step, passes in a row",
        ),
        bars=charts.stacked_bars(
            {result.strategy: {cause: result.seconds[cause] for cause in CAUSES} for result in simulation.results},
            label="Modelled time by cause, one bar per strategy",
            unit="s",
        ),
        maps={
            result.strategy: charts.heat_map(
                result.imbalance_ML[:_MOST_COLUMNS], label=f"Imbalance by layer, {result.strategy}", high=high
            )
            for result in simulation.results
        },
        constants=constants_of(simulation),
    )


def write_report(simulation: Simulation, path: str | Path) -> None:
    """Write the report; raises TraceError if the file cannot be written."""
    try:
        Path(path).write_text(render_report(simulation), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write the report {path}: {error}") from error
