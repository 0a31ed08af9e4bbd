"""How a job's progress is drawn, wherever it runs: one table from one `Progress`.

A terminal gets a picture that is redrawn, a log file gets one line per change worth a line.
"""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from foremoe_operator.api.constants import Stage
from foremoe_operator.api.progress import Progress

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE_POINTS = 40


class ProgressView:
    """Draws the progress of one job as it changes; use as a context manager."""

    def __init__(self, name: str, console: Console, *, workers: int) -> None:
        self._name = name
        self._console = console
        self._workers = workers
        self._rewards: list[float] = []
        self._last = Progress()
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._started = datetime.now(UTC)

    def __enter__(self) -> ProgressView:
        """Start drawing."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the last picture standing."""
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Draw the state; the same state again costs nothing."""
        if progress.step > self._last.step and progress.reward is not None:
            self._rewards.append(progress.reward)
        if self._live is not None:
            elapsed = (datetime.now(UTC) - self._started).total_seconds()
            self._live.update(
                render(self._name, progress, workers=self._workers, rewards=self._rewards, elapsed_seconds=elapsed)
            )
        elif line := news(self._last, progress, workers=self._workers):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._last = progress


def render(
    name: str, progress: Progress, *, workers: int, rewards: list[float], elapsed_seconds: float
) -> RenderableType:
    """The picture of a job."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("job", f"{name}   {elapsed_seconds:.0f} s")
    table.add_row("stage", f"{progress.stage}   {progress.workers_joined}/{workers} workers")
    total = max(progress.total_steps, 1)
    bar = ProgressBar(total=total, completed=progress.step, width=_CURVE_POINTS)
    table.add_row("steps", f"{progress.step}/{progress.total_steps}")
    table.add_row("", bar)
    if progress.reward is not None:
        table.add_row("reward", f"{progress.reward:.3f}   {curve(rewards)}")
    if progress.step_seconds is not None:
        table.add_row("step time", f"{progress.step_seconds:.1f} s")
    if progress.balance is not None:
        balance = progress.balance
        table.add_row("imbalance", f"{balance.mean:.2f} mean, {balance.max:.2f} worst   (max/mean rank load)")
        if balance.planned is not None and balance.executed is not None:
            followed = "as planned" if balance.as_planned else "NOT as planned"
            waited = f"{balance.exposed_seconds or 0:.2f} s waited for transfers"
            table.add_row(
                "with plans", f"{balance.planned:.2f} planned, {balance.executed:.2f} executed, {followed}; "
                f"{balance.copies or 0} replicas, {waited}"
            )  # fmt: skip
    if progress.checkpoint is not None:
        table.add_row("checkpoint", f"step {progress.checkpoint.step}: {progress.checkpoint.path}")
    if progress.problem is None:
        return table
    return Group(table, Text(f"{progress.problem.reason}: {progress.problem.message}", style="bold red"))


def news(before: Progress, now: Progress, *, workers: int) -> str:
    """One line about what changed, for logs; empty if it is not worth one."""
    if now.problem is not None and before.problem is None:
        return f"{now.problem.reason}: {now.problem.message}"
    if now.step > before.step:
        parts = [f"step {now.step}/{now.total_steps}"]
        if now.reward is not None:
            parts.append(f"reward {now.reward:.3f}")
        if now.step_seconds is not None:
            parts.append(f"{now.step_seconds:.1f} s")
        if now.balance is not None:
            parts.append(f"imbalance {now.balance.mean:.2f} mean {now.balance.max:.2f} worst")
            if now.balance.executed is not None:
                parts.append(
                    f"executed {now.balance.executed:.2f}" + ("" if now.balance.as_planned else ", NOT as planned")
                )
        return ", ".join(parts)
    if now.checkpoint is not None and now.checkpoint != before.checkpoint:
        return f"checkpoint of step {now.checkpoint.step}: {now.checkpoint.path}"
    # Stages of a step change several times a step; before the first one they are all the news there is.
    if now.stage is not before.stage and (now.step == 0 or now.stage is Stage.FINISHED):
        return f"{now.stage} ({now.workers_joined}/{workers} workers)"
    return ""


def curve(values: list[float], *, points: int = _CURVE_POINTS) -> str:
    """Values as a line of block characters, the newest last, from the least to the greatest."""
    shown = values[-points:]
    if len(shown) < 2 or max(shown) == min(shown):
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_BLOCKS[int((value - low) / span * (len(_BLOCKS) - 1))] for value in shown)
