"""What a step did, as numbers that are equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foremoe.routing.counting import imbalance

__all__ = ["Mismatch", "StepReport"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Recorded pairs that were not executed as planned."""

    micro_step: int
    layer: int
    expert: int
    rank: int
    """Source rank whose tokens differ."""
    planned: int
    executed: int

    def __str__(self) -> str:
        return (
            f"micro-step {self.micro_step}, layer {self.layer}, expert {self.expert}, rank {self.rank}: "
            f"{self.planned} pairs planned, {self.executed} executed"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class StepReport:
    """One step of the runtime. Shapes: M micro-step, L MoE layer, R rank; loads count token-expert pairs."""

    planned_MLR: IntArray
    """Recorded pairs every rank was to compute."""
    executed_MLR: IntArray
    """Recorded pairs every rank computed; equal to `planned_MLR` unless `mismatches` says otherwise."""
    live_MLR: IntArray
    """Pairs without a record that every rank computed besides."""
    step_copies: int
    """Replicas pushed for the whole step."""
    dynamic_copies: int
    """Replicas brought within micro-steps, over all micro-steps."""
    moved_homes: int
    """Experts whose home changed at the start of the step."""
    plan_seconds: float
    """Planning on the critical path, the slowest rank's."""
    hidden_seconds: float
    """Transfer time behind compute, the largest of any rank."""
    exposed_seconds: float
    """Time compute waited for transfers within the step, the largest of any rank."""
    dynamic_exposed_seconds: float
    """Of these, what recurs in every micro-step: waiting for dynamic replicas. Step replicas cost once per step."""
    moved_bytes: int
    """Bytes of weights and gradients that arrived, all ranks together."""
    host_moves: int
    direct_moves: int
    replica_bytes: int
    """Memory for replicas and their gradients, the largest of any rank."""
    live_rows: int
    """Rows routed live for want of a record, over all layers, micro-steps and ranks."""
    unplanned_micro_steps: tuple[int, ...]
    """Micro-steps whose tokens were fewer than their record, so that the plan could not be followed."""
    mismatches: tuple[Mismatch, ...]
    """The first few differences between planned and executed counts."""
    nonfinite_layers: tuple[int, ...]
    """Layers whose routing weights held NaN or infinity on some rank."""
    fell_back: bool
    """True if the record was set aside because the step before had not executed its plan."""

    @property
    def copies(self) -> int:
        """All replicas that were brought somewhere in this step."""
        return self.step_copies + self.dynamic_copies

    @property
    def imbalance_ML(self) -> npt.NDArray[np.float64]:
        """Max over mean of the recorded pairs the ranks computed; 1.0 for an empty micro-step."""
        return imbalance(self.executed_MLR)

    @property
    def total_imbalance_ML(self) -> npt.NDArray[np.float64]:
        """Max over mean of all pairs the ranks computed, those without a record included."""
        return imbalance(self.executed_MLR + self.live_MLR)

    @property
    def planned_imbalance_ML(self) -> npt.NDArray[np.float64]:
        """Max over mean of what the plan foresaw."""
        return imbalance(self.planned_MLR)

    @property
    def as_planned(self) -> bool:
        """True if every recorded pair was executed where it was planned."""
        return not self.mismatches and bool((self.planned_MLR == self.executed_MLR).all())
