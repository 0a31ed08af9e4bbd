"""Whether training goes the same way with experts in parallel as with veRL's own engine: reward curves over seeds.

    python benchmarks/grpo_curves.py --steps 30 --seeds 1,2,3 --directory /tmp/curves

Runs the example (`examples/grpo-tiny-moe.yaml`) through `foremoe run` once per engine and seed: `foremoe` is the
example as it is, `stock` the same manifest with `parallelism.expert: 1`, which leaves experts to veRL's FSDP2 engine.
The model, the problems and everything else are the same files. A seed sets the order of the data and the samples; two
runs of one seed still differ, because veRL orders a batch by random ids, so curves are compared by their spread.

Prints and writes (`--out`) per run: reward at equidistant steps, its mean over the last ten steps, and the difference
of log-probabilities between rollout and recompute as veRL measures it (mean and worst of all tokens of all steps).
Finished runs are kept in the directory and not run again. No time is measured.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo-tiny-moe.yaml"
ENGINES = {"foremoe": 2, "stock": 1}
"""Size of an expert-parallel group that selects the engine."""
LAST = 10
METRICS = {
    "reward": "critic/rewards/mean",
    "difference_mean": "training/rollout_probs_diff_mean",
    "difference_max": "training/rollout_probs_diff_max",
    "log_ppl_difference": "rollout_corr/log_ppl_abs_diff",
    "grad_norm": "actor/grad_norm",
}
_STEP = re.compile(r"\bstep:(\d+) - (.*)")


def main(
    directory: Annotated[Path, typer.Option(help="Where model, data and runs are kept.")],
    steps: Annotated[int, typer.Option(min=2, help="RL steps of each run.")] = 30,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "1,2,3",
    out: Annotated[Path | None, typer.Option(help="JSON file for every step's figures.")] = None,
) -> None:
    """Train the example with both engines over several seeds and compare the curves."""
    directory.mkdir(parents=True, exist_ok=True)
    prepare(directory)
    runs: dict[str, dict[str, list[float]]] = {}
    for seed in [int(word) for word in seeds.split(",")]:
        for engine, group in ENGINES.items():
            runs[f"{engine} seed {seed}"] = run(directory, engine=engine, group=group, seed=seed, steps=steps)
            if out is not None:
                when = datetime.now(UTC).isoformat(timespec="seconds")
                out.write_text(json.dumps({"date": when, "steps": steps, "runs": runs}) + "\n")
    show(runs, steps=steps)


def prepare(directory: Path) -> None:
    """Make the model and the problems that all runs share."""
    volume = directory / ".foremoe" / "volumes" / "foremoe-demo"
    for kind, marker in (("data", "train.parquet"), ("model", "config.json")):
        if not (volume / kind / marker).is_file():
            foremoe(directory, kind, "create", str(volume / kind))


def run(directory: Path, *, engine: str, group: int, seed: int, steps: int) -> dict[str, list[float]]:
    """One run's figures per step; taken from its log if it is there already."""
    name = f"{engine}-{seed}"
    job: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    spec = job["spec"]
    job["metadata"]["name"] = name
    spec["parallelism"]["expert"] = group
    spec["checkpoint"] |= {"path": f"/shared/checkpoints/{name}", "everySteps": steps}
    spec["trace"]["path"] = f"/shared/traces/{name}"
    kept = [argument for argument in spec["args"] if not re.match(r"(data|.*rollout)\.seed=", argument)]
    spec["args"] = [*kept, f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
    log = directory / ".foremoe" / "runs" / name / "head" / "log"
    if not log.is_file() or len(figures(log)["reward"]) < steps:
        manifest = directory / f"{name}.yaml"
        manifest.write_text(yaml.safe_dump(job))
        foremoe(directory, "run", str(manifest), "--steps", str(steps))
    found = figures(log)
    if len(found["reward"]) != steps:
        raise SystemExit(f"{log} shows {len(found['reward'])} steps instead of {steps}")
    return found


def foremoe(directory: Path, *arguments: str) -> None:
    """Run the `foremoe` command line beside this Python, in the directory."""
    command = [str(Path(sys.executable).with_name("foremoe")), *arguments]
    if subprocess.run(command, cwd=directory, check=False).returncode:
        raise SystemExit(f"failed: {' '.join(command)}")


def figures(log: Path) -> dict[str, list[float]]:
    """The trainer's figures by name, one value per step."""
    steps: dict[int, dict[str, str]] = {}
    for line in log.read_text(errors="replace").splitlines():
        if found := _STEP.search(line):
            steps[int(found[1])] = dict(word.rsplit(":", 1) for word in found[2].split(" - ") if ":" in word)
    return {
        name: [float(steps[step][key]) for step in sorted(steps) if key in steps[step]]
        for name, key in METRICS.items()
    }  # fmt: skip


def show(runs: dict[str, dict[str, list[float]]], *, steps: int) -> None:
    """Print the curves and, per engine, the spread over seeds."""
    at = sorted({1, *range(5, steps + 1, 5), steps})
    table = Table(title=f"GRPO, {steps} steps: mean reward of a step's samples; rollout against recompute")
    for column in ("run", *(f"step {step}" for step in at), f"last {LAST}", "|dp| mean", "|dp| max", "|d log ppl|"):
        table.add_column(column, justify="left" if column == "run" else "right", no_wrap=True)
    for name, found in runs.items():
        table.add_row(
            name, *(f"{found['reward'][step - 1]:.2f}" for step in at), f"{last(found):.3f}",
            f"{statistics.fmean(found['difference_mean']):.1e}", f"{max(found['difference_max']):.1e}",
            f"{max(found['log_ppl_difference']):.1e}",
        )  # fmt: skip
    console = Console(width=200)
    console.print(table)
    for engine in ENGINES:
        ends = [last(found) for name, found in runs.items() if name.startswith(f"{engine} ")]
        spread = f"+- {statistics.stdev(ends):.3f}" if len(ends) > 1 else ""
        console.print(f"{engine}: reward over the last {LAST} steps {statistics.fmean(ends):.3f} {spread}")


def last(found: dict[str, list[float]]) -> float:
    """Mean reward of the last steps, where a single step's noise is averaged out."""
    return statistics.fmean(found["reward"][-LAST:])


if __name__ == "__main__":
    typer.run(main)
