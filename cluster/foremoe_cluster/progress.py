"""Phase names and seconds as they pass."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


Progress = Callable[[str], None]
"""Takes a word on how far a phase is."""


@contextmanager
def phase(name: str) -> Iterator[Progress]:
    """Show that a phase runs (on a terminal), then print its name and how long it took.

    What it yields takes a word on how far the phase is.
    """
    began = time.monotonic()
    with console.status(name) as status:
        try:
            yield lambda detail: status.update(f"{name}: {detail}")
        except BaseException:
            _line("[red]failed[/]", name, time.monotonic() - began)
            raise
    _line("[green]ok    [/]", name, time.monotonic() - began)


def note(text: str) -> None:
    """A line of its own, for what is not a phase."""
    console.print(text, soft_wrap=True)


def _line(mark: str, name: str, seconds: float) -> None:
    console.print(f"{mark} {seconds:6.1f} s  {name}", soft_wrap=True)
