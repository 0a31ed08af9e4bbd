"""`foremoe data create`: training and validation prompts in veRL's parquet layout, from reasoning-gym."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from foremoe.cli.tasks import DEFAULT_TASK, Problem, Task, distinct_problems, parse_settings
from foremoe.errors import LaunchError

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Create training data to try things with.")


@app.callback()
def _root() -> None:
    """Create training data to try things with."""


@app.command()
def create(
    directory: Path = typer.Argument(help="Directory to write train.parquet and val.parquet into."),
    task: str = typer.Option(DEFAULT_TASK, help="Task of the reasoning-gym library."),
    settings: list[str] = typer.Option([], "--set", help="Setting of the task's generator, as name=value; repeatable."),
    train: int = typer.Option(32, min=1, help="Number of training problems."),
    val: int = typer.Option(16, min=1, help="Number of validation problems; none of them is in the training set."),
    seed: int = typer.Option(42, help="Seed of the problems."),
    force: bool = typer.Option(False, "--force", help="Replace files that are there."),
) -> None:
    """Write problems of a reasoning-gym task, with what its verifier needs, as train.parquet and val.parquet."""
    console = Console(highlight=False)
    targets = {"train": directory / "train.parquet", "val": directory / "val.parquet"}
    if not force and all(path.is_file() for path in targets.values()):
        console.print(
            f"{directory} already holds train.parquet and val.parquet; --force replaces them",
            markup=False,
            soft_wrap=True,
        )
        return
    chosen = Task(name=task, settings=parse_settings(settings))
    problems = distinct_problems(chosen, train + val, seed=seed)
    parts = {"val": problems[:val], "train": problems[val:]}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for split, path in targets.items():
            write_parquet(path, [prompt_row(problem, task=task, split=split) for problem in parts[split]])
    except OSError as error:
        raise LaunchError(f"cannot write to {directory}: {error.strerror}") from error
    console.print(
        f"{task}: {train} training and {val} validation problems in {directory}", markup=False, soft_wrap=True
    )


def prompt_row(problem: Problem, *, task: str, split: str) -> dict[str, Any]:
    """One row as veRL's dataset reads it; `extra_info` carries what the library's verifier needs."""
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "reasoning",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"task": task, "split": split, "entry": problem.entry},
    }


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows; the file appears complete or not at all."""
    import pyarrow
    import pyarrow.parquet

    for index, row in enumerate(rows):
        row["extra_info"]["index"] = index
    temporary = path.with_name(f".{path.name}.tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
    temporary.replace(path)
