"""Measured cells, their bars, and the kept results."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Cell:
    """One measured cell: value against must and goal; lower is better unless `higher`."""

    piece: str
    what: str
    value: float
    must: float | None = None
    goal: float | None = None
    higher: bool = False
    note: str = ""

    def verdict(self) -> str:
        """goal, must, missed, or nothing where no bar is set."""

        def meets(bar: float | None) -> bool:
            return bar is not None and (self.value >= bar if self.higher else self.value <= bar + 1e-12)

        if self.must is None and self.goal is None:
            return ""
        if meets(self.goal):
            return "goal met"
        if meets(self.must):
            return "must met" if self.goal is not None else "met"
        return "MISSED" if self.must is not None else "goal missed"


def line(cell: Cell) -> str:
    bars = " ".join(
        f"{label} {bar:.4g}" for label, bar in (("must", cell.must), ("goal", cell.goal)) if bar is not None
    )
    return f"{cell.piece:9} {cell.what:95} {cell.value:10.4f}  {bars:24} {cell.verdict():12} {cell.note}"


def keep(piece: str, cells: list[Cell]) -> None:
    """Replace one piece in the kept results."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "planner.json"
    data = json.loads(path.read_text()) if path.exists() else {}
    data[piece] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "cells": [{**asdict(cell), "verdict": cell.verdict()} for cell in cells],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")
    rows = [
        "# Planner benchmark",
        "",
        "Written by `python benchmarks/planner.py`. Times of planning are CPU times.",
        "",
    ]
    for name, entry in data.items():
        rows += [f"## {name}", "", f"{entry['date']}, {entry['machine']}", ""]
        rows += ["| what | value | must | goal | verdict | note |", "| --- | ---: | ---: | ---: | --- | --- |"]
        for cell in entry["cells"]:
            must, goal = (("" if cell[bar] is None else f"{cell[bar]:.4g}") for bar in ("must", "goal"))
            rows.append(
                f"| {cell['what']} | {cell['value']:.4f} | {must} | {goal} | {cell['verdict']} | {cell['note']} |"
            )
        rows.append("")
    (RESULTS / "planner.md").write_text("\n".join(rows))
