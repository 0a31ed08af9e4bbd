"""Gathers what the ranks executed, makes the step's report and judges it; equal everywhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from foremoe.moe.report import Mismatch, StepReport
from foremoe.moe.step import Step
from foremoe.transfer import ControlPlane, PathName, TransferTimes

__all__ = ["make_report", "trustworthy"]

_log = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]

# A wrong record differs almost everywhere; the first few tell as much as all.
_MAX_MISMATCHES = 8


def make_report(
    step: Step, *, control: ControlPlane, times: TransferTimes, replica_bytes: int, experts: int, layers: int
) -> StepReport:
    """The report of a step whose gradients are home."""
    micro_steps, ranks = len(step.records), control.size
    rows_LM, live_LM, source_MLE = _executed(step, micro_steps, layers, experts)
    rows_RLM = control.gather(np.stack([rows_LM, live_LM]), what="gathering executed counts")
    live_MLR = rows_RLM[:, 1].transpose(2, 1, 0)
    facts = control.gather_objects(
        (_mismatches(step, source_MLE, control.rank), step.plan_seconds, times, replica_bytes, _nonfinite(step)),
        what="gathering the step's report",
    )
    planned_MLR = np.zeros((micro_steps, layers, ranks), dtype=np.int64)
    if not step.forecast:
        for layer, plan in enumerate(step.plans):
            planned_MLR[:, layer] = plan.common.planned_MR
    all_times = [fact[2] for fact in facts]
    return StepReport(
        planned_MLR=planned_MLR,
        executed_MLR=rows_RLM[:, 0].transpose(2, 1, 0) - live_MLR,
        live_MLR=live_MLR,
        step_copies=sum(len(plan.common.step_copies) for plan in step.plans),
        dynamic_copies=0
        if step.forecast
        else sum(len(copies) for plan in step.plans for copies in plan.common.dynamic_copies_M),
        moved_homes=step.moved_homes,
        plan_seconds=max(fact[1] for fact in facts),
        hidden_seconds=max(each.hidden_seconds for each in all_times),
        exposed_seconds=max(each.exposed_seconds for each in all_times),
        dynamic_exposed_seconds=max(each.dynamic_exposed_seconds for each in all_times),
        moved_bytes=sum(each.moved_bytes for each in all_times),
        host_moves=sum(each.moves[PathName.HOST] for each in all_times),
        direct_moves=sum(each.moves[PathName.DIRECT] for each in all_times),
        replica_bytes=max(fact[3] for fact in facts),
        live_rows=sum(step.live_rows.values()),
        unplanned_micro_steps=tuple(sorted(step.unplanned)),
        mismatches=tuple(mismatch for fact in facts for mismatch in fact[0])[:_MAX_MISMATCHES],
        nonfinite_layers=tuple(sorted({layer for fact in facts for layer in fact[4]})),
        fell_back=step.fell_back,
    )


def _executed(step: Step, micro_steps: int, layers: int, experts: int) -> tuple[IntArray, IntArray, IntArray]:
    """Rows computed and live rows [L, M], and recorded pairs asked for [M, L, E], all of this rank."""
    rows_LM = np.zeros((layers, micro_steps), dtype=np.int64)
    live_LM = np.zeros_like(rows_LM)
    source_MLE = np.zeros((micro_steps, layers, experts), dtype=np.int64)
    counters = step.counters
    for (micro_step, layer), rows in counters.rows.items():
        rows_LM[layer, micro_step] = rows
        live_LM[layer, micro_step] = counters.live[micro_step, layer]
    if counters.source:
        keys = list(counters.source)
        counts = torch.stack([counters.source[key] for key in keys]).cpu().numpy()
        for (micro_step, layer), load_E in zip(keys, counts, strict=True):
            source_MLE[micro_step, layer] = load_E
    return rows_LM, live_LM, source_MLE


def _mismatches(step: Step, source_MLE: IntArray, rank: int) -> Sequence[Mismatch]:
    if step.forecast or step.fell_back:
        return ()
    planned_MLE = np.stack([record.load_LE for record in step.records]) if step.records else source_MLE
    return [
        Mismatch(
            micro_step=int(m),
            layer=int(layer),
            expert=int(expert),
            rank=rank,
            planned=int(planned_MLE[m, layer, expert]),
            executed=int(source_MLE[m, layer, expert]),
        )
        for m, layer, expert in np.argwhere(planned_MLE != source_MLE)[:_MAX_MISMATCHES]
    ]


def _nonfinite(step: Step) -> Sequence[int]:
    return [layer for layer, bad in sorted(step.counters.nonfinite.items()) if bool(bad)]


def trustworthy(report: StepReport) -> bool:
    """Whether the step followed its plan, so that the next one may; says in the log what went wrong."""
    if report.unplanned_micro_steps:
        _log.warning(
            "micro-steps %s had fewer tokens than their record and ran without a plan",
            list(report.unplanned_micro_steps),
        )
    if report.nonfinite_layers:
        _log.error("routing weights of MoE layers %s are not finite", list(report.nonfinite_layers))
    followed = np.ones(report.planned_MLR.shape[0], dtype=bool)
    followed[list(report.unplanned_micro_steps)] = False
    unexplained = [m for m in report.mismatches if followed[m.micro_step]]
    if not unexplained and not (report.planned_MLR != report.executed_MLR)[followed].any():
        return True
    first = f": {unexplained[0]}" if unexplained else ""
    _log.error("the step was not executed as planned%s; the next step routes live", first)
    return False
