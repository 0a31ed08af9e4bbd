"""What a pass of the expert-parallel engine did, as veRL's metrics and as numbers of the run's progress."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foremoe.moe import StepReport

__all__ = ["ExecutedBalance", "pass_metrics"]

PREFIX = "foremoe/"


def pass_metrics(report: StepReport) -> dict[str, float]:
    """Numbers of one pass, under the names users see behind veRL's own prefix. Imbalance is max over mean load."""
    values = {
        "imbalance_planned": _mean(report.planned_imbalance_ML),
        "imbalance_executed": _mean(report.imbalance_ML),
        "imbalance_executed_max": float(report.imbalance_ML.max(initial=1.0)),
        "copies": report.copies,
        "moved_homes": report.moved_homes,
        "transfer_hidden_seconds": report.hidden_seconds,
        "transfer_exposed_seconds": report.exposed_seconds,
        "plan_seconds": report.plan_seconds,
        "live_rows": report.live_rows,
        "as_planned": report.as_planned,
    }
    return {f"{PREFIX}{name}": float(value) for name, value in values.items()}


def _mean(imbalance_ML: np.ndarray) -> float:
    return float(imbalance_ML.mean()) if imbalance_ML.size else 1.0


@dataclass(kw_only=True)
class ExecutedBalance:
    """The replayed passes of one step, added up."""

    planned_sum: float = 0.0
    executed_sum: float = 0.0
    count: int = 0
    copies: int = 0
    exposed_seconds: float = 0.0
    as_planned: bool = True

    def add(self, report: StepReport) -> None:
        """Add a pass; one that replayed nothing (a reference model) has no plan to be compared with."""
        self.copies += report.copies
        self.exposed_seconds += report.exposed_seconds
        if report.planned_MLR.any():
            self.planned_sum += float(report.planned_imbalance_ML.sum())
            self.executed_sum += float(report.imbalance_ML.sum())
            self.count += report.imbalance_ML.size
            self.as_planned &= report.as_planned

    def fields(self) -> dict[str, float | int | bool]:
        """What the agent is told."""
        if not self.count:
            return {}
        return {
            "planned": self.planned_sum / self.count,
            "executed": self.executed_sum / self.count,
            "copies": self.copies,
            "exposed_seconds": self.exposed_seconds,
            "as_planned": self.as_planned,
        }
