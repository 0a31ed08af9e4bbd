"""Entry point of the `foremoe` command.

Sub-commands are loaded by name when they are called: `foremoe --help` must not import torch, and the operator image,
which has no numpy, still offers the commands that need none. Every sub-command is a module with a `typer.Typer` named
`app`; a missing optional dependency is reported as the extra to install, never as a traceback. Errors of our own tree
end the command with one line and exit code 2.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

import typer
from rich.console import Console

from foremoe import __version__
from foremoe.errors import ForeMoEError, LaunchError

_COMMANDS = {
    "bench": "Measure expert-parallel training steps here.",
    "data": "Create training data from reasoning-gym tasks.",
    "model": "Create a small MoE model to try things with.",
    "run": "Run a ForeMoEJob as local processes.",
    "simulate": "Compare balancing strategies over a trace.",
    "trace": "Generate, inspect and convert routing traces.",
}


def build(chosen: str | None) -> typer.Typer:
    """The command line with the sub-command `chosen` loaded; of all others only name and help are there."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False)
    app.callback(invoke_without_command=True)(root)
    for name, text in sorted(_COMMANDS.items()):
        if name != chosen:
            app.command(name, help=text)(_not_loaded)
            continue
        loaded = _load(name)
        single = _only_command(loaded)
        if single is None:
            app.add_typer(loaded, name=name, help=text)
        else:
            app.command(name, help=text)(single)
    return app


def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Exact expert load balancing for RL post-training of Mixture-of-Experts models."""
    if version:
        typer.echo(f"foremoe {__version__}")
        raise typer.Exit


def _load(name: str) -> typer.Typer:
    """Import a sub-command. Raises LaunchError naming the extra to install if a package is missing."""
    try:
        module = importlib.import_module(f"foremoe.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "foremoe":
            raise
        raise LaunchError(
            f"'foremoe {name}' needs the Python package '{error.name}': pip install 'foremoe[worker]'"
        ) from error
    app = module.app
    assert isinstance(app, typer.Typer)
    return app


def _only_command(app: typer.Typer) -> Callable[..., None] | None:
    """The function of an app that is one command, None for one that has sub-commands."""
    if app.registered_callback is not None or app.registered_groups or len(app.registered_commands) != 1:
        return None
    return app.registered_commands[0].callback


def _not_loaded() -> None:
    """Stands for a sub-command that was not asked for; shows only in the list of commands."""


def main() -> None:
    """Run the command line; exit code 2 for a mistake of the caller that we can name."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    try:
        build(words[0] if words else None)()
    except ForeMoEError as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", markup=False, highlight=False)
        sys.exit(2)
