"""`foremoe model create`: a Mixture-of-Experts model small enough to train on a laptop's processor.

It is a toy with a real architecture: transformers' Qwen3-MoE with packed experts, so every path that a 30-billion model
takes through veRL and this library is taken here too. Reinforcement learning needs a policy that is right now and
then, so the model is warmed up on solved problems for some seconds; `--warmup-steps 0` leaves it random.
"""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from foremoe.cli.tasks import DEFAULT_TASK, Task, parse_settings
from foremoe.errors import LaunchError

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Create a small Mixture-of-Experts model to try things with."
)


@app.callback()
def _root() -> None:
    """Create a small Mixture-of-Experts model to try things with."""


@app.command()
def create(
    directory: Path = typer.Argument(help="Directory to write the model and its tokenizer into."),
    experts: int = typer.Option(16, min=2, max=1024, help="Experts of each layer."),
    top_k: int = typer.Option(4, min=1, help="Experts each token is sent to."),
    layers: int = typer.Option(4, min=1, max=128, help="Layers, each with a Mixture-of-Experts block."),
    hidden_size: int = typer.Option(64, min=8, help="Width of the model."),
    task: str = typer.Option(DEFAULT_TASK, help="reasoning-gym task for tokenizer and warm-up."),
    settings: list[str] = typer.Option([], "--set", help="Setting of the task's generator, as name=value; repeatable."),
    warmup_steps: int = typer.Option(320, min=0, help="Supervised steps on solved problems; 0 leaves it random."),
    seed: int = typer.Option(0, help="Seed of the weights and of the warm-up."),
    force: bool = typer.Option(False, "--force", help="Replace a model that is there."),
) -> None:
    """Create a small Qwen3-MoE with its tokenizer and warm it up on solved problems."""
    console = Console(highlight=False)
    if (directory / "config.json").is_file() and not force:
        console.print(f"{directory} already holds a model; --force replaces it", markup=False, soft_wrap=True)
        return
    if top_k > experts:
        raise LaunchError(f"--top-k {top_k} exceeds --experts {experts}")
    _create(
        console,
        directory,
        shape={"experts": experts, "top_k": top_k, "layers": layers, "hidden_size": hidden_size},
        task=Task(name=task, settings=parse_settings(settings)),
        warmup_steps=warmup_steps,
        seed=seed,
    )


def _create(
    console: Console, directory: Path, *, shape: dict[str, int], task: Task, warmup_steps: int, seed: int
) -> None:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        row = bar.add_task("loading transformers", total=None, note="")
        from foremoe.cli import toy_model

        toy_model.quiet_transformers()
        tokenizer = toy_model.build_tokenizer(task, seed=seed)
        model = toy_model.build_model(len(tokenizer), toy_model.Shape(**shape), seed=seed)
        bar.update(row, description="warm-up", total=max(warmup_steps, 1))
        for step in toy_model.warm_up(model, tokenizer, task, steps=warmup_steps, seed=seed):
            bar.update(row, completed=step.number, note=f"loss {step.loss:.2f}")
        bar.update(row, description="measuring", note="")
        solved = toy_model.solve_rate(model, tokenizer, task, seed=seed)
        try:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            # safetensors writes for its owner alone; the pods that read a shared volume may have another user.
            for weights in directory.glob("*.safetensors"):
                weights.chmod(0o644)
        except OSError as error:
            raise LaunchError(f"cannot write to {directory}: {error}") from error
        bar.update(row, description="done", completed=max(warmup_steps, 1))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{directory}: {parameters / 1e6:.2f} M parameters, {shape['layers']} layers of {shape['experts']} experts, "
        f"top-{shape['top_k']}; samples the right answer with probability {solved:.2f}",
        markup=False,
        soft_wrap=True,
    )
