"""Routing capture: what every pass of a step asks of every rank, counted before the pass runs.

The rollout's record is in the batch of old log-probs, reference and update, so the loads of all their micro-steps are
known before the first forward call. Each rank counts its own micro-batches, counts travel inside the EP group only, and
the group's first rank appends one record per pass to the trace. Raw routing never leaves its rank.

Always: filler is not counted (`rows`); the trace has each (step, pass) once, also after a resume; all ranks of a group
make the same collective calls in the same order, whether or not they carry a record.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from foremoe.errors import TraceError
from foremoe.moe import StepReport
from foremoe.planner import BasePlacement
from foremoe.routing import PassRecord, TraceMeta, TraceWriter, count_experts, rank_imbalance
from foremoe.verl.events import EventSender
from foremoe.verl.expert_report import ExecutedBalance
from foremoe.verl.groups import GroupInfo
from foremoe.verl.observation import Observation

logger = logging.getLogger(__name__)


class StepBalance:
    """Balance of the step that is running, over all its passes; one per process, shared by its engines."""

    def __init__(self, events: EventSender) -> None:
        self._events = events
        self._step = -1
        self._sum, self._count, self._max = 0.0, 0, 1.0
        self._executed = ExecutedBalance()

    def add(self, *, step: int, total: float, count: int, peak: float) -> None:
        """Add a pass and report the step so far; `total` and `count` are of its layers and micro-steps."""
        self._enter(step)
        self._sum += total
        self._count += count
        self._max = max(self._max, peak)
        self._send()

    def add_executed(self, report: StepReport, *, step: int) -> None:
        """Add what a pass of the expert-parallel engine did, and report the step so far."""
        self._enter(step)
        self._executed.add(report)
        self._send()

    def _enter(self, step: int) -> None:
        if step != self._step:
            self._step, self._sum, self._count, self._max = step, 0.0, 0, 1.0
            self._executed = ExecutedBalance()

    def _send(self) -> None:
        if self._count:
            mean = self._sum / self._count
            self._events.send("balance", step=self._step, mean=mean, max=self._max, **self._executed.fields())


class TraceKeeper:
    """The trace of this run; one per process, opened by its first pass.

    The run's first rank drops what an earlier attempt wrote from that step on, so a resumed run has every step once.
    """

    def __init__(self, directory: Path, *, model: str, job: str) -> None:
        self._directory = directory
        self._model = model
        self._job = job
        self._writer: TraceWriter | None = None
        self._broken = False

    def open(self, *, step: int, info: GroupInfo, experts: int, layers: int, top_k: int) -> None:
        """Open the trace unless it is; the caller sees to it that group 0 does so first."""
        if self._writer is not None or self._broken:
            return
        meta = TraceMeta(
            experts=experts,
            layers=layers,
            source_ranks=info.size,
            top_k=top_k,
            model=self._model,
            created_by="foremoe.verl",
            extra={"job": self._job, "expert_groups": str(info.groups)},
        )
        try:
            self._writer = TraceWriter(self._directory, meta, resume_step=step if info.index == 0 else None)
        except TraceError as error:
            # Training goes on without a trace: it is worth less than the run.
            self._broken = True
            logger.error("foremoe: no trace is kept: %s", error)

    def append(self, record: PassRecord) -> None:
        """Append a pass; a failure is logged, and the next pass is tried again."""
        if self._writer is None:
            return
        try:
            self._writer.append(record)
        except TraceError as error:
            logger.error("foremoe: pass %s of step %d is not in the trace: %s", record.name, record.step, error)


class RoutingCapture:
    """Counts, gathers, writes and reports the passes of one engine."""

    def __init__(
        self,
        *,
        group: Any,
        info: GroupInfo,
        experts: int,
        moe_layers: list[int],
        balance: StepBalance,
        trace: TraceKeeper | None,
        device: torch.device,
        counts_rows: bool = True,
    ) -> None:
        self._group = group
        self._info = info
        self._experts = experts
        self._moe_layers = moe_layers
        self._balance = balance
        self._trace = trace
        self._device = device
        self._counts_rows = counts_rows
        self._base = BasePlacement.contiguous(experts=experts, ranks=info.size)
        self._pending: PassRecord | None = None

    def observe(self, observation: Observation, *, step: int, name: str) -> npt.NDArray[np.int64] | None:
        """Count a pass: load [micro_steps, layers, source_ranks, experts] of this EP group; None without a record.

        Collective over all ranks. The pass is written to the trace by `finish`.
        """
        self._pending = None
        if observation.top_k == 0:
            return None
        keeps = self._trace is not None and self._info.rank_in_group == 0
        if keeps and self._info.index == 0:
            self._open(step, observation.top_k)
        load_MLSE = self._gather(self._count(observation))
        # This is a collective over all ranks: past it, group 0 has opened the trace and cleared old steps.
        self._report(load_MLSE, step=step)
        if keeps:
            self._open(step, observation.top_k)
            self._pending = self._record(load_MLSE, step=step, name=name)
        return load_MLSE

    def finish(
        self, executed_MLR: npt.NDArray[np.int64] | None = None, *, bases: Sequence[BasePlacement] | None = None
    ) -> None:
        """The observed pass is over: append it to the trace.

        `executed_MLR`: pairs that every rank computed. `bases`: homes of each layer while it ran, where they move.
        """
        if self._pending is not None and self._trace is not None:
            record = replace(self._pending, executed_MLR=executed_MLR)
            if bases is not None:
                record = replace(record, home_LE=np.stack([base.home_E for base in bases]))
            self._trace.append(record)
        self._pending = None

    def report_executed(self, report: StepReport, *, step: int) -> None:
        """Report what a pass did, by the first EP group for all."""
        if self._info.index == 0 and self._info.rank_in_group == 0:
            self._balance.add_executed(report, step=step)

    def _count(self, observation: Observation) -> npt.NDArray[np.int64]:
        shape = (len(observation.routes), len(self._moe_layers), self._experts)
        load_MLE = np.zeros(shape, dtype=np.int64)
        for index, routes in enumerate(observation.routes):
            # Sequence-parallel peers hold the same rows: one of them counts.
            if routes is not None and self._counts_rows:
                load_MLE[index] = count_experts(routes, experts=self._experts)
        return load_MLE

    def _open(self, step: int, top_k: int) -> None:
        assert self._trace is not None
        self._trace.open(step=step, info=self._info, experts=self._experts, layers=len(self._moe_layers), top_k=top_k)

    def _gather(self, load_MLE: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        mine = torch.from_numpy(load_MLE).to(self._device)
        pieces = [torch.empty_like(mine) for _ in range(self._info.size)]
        dist.all_gather(pieces, mine, group=self._group)
        gathered: npt.NDArray[np.int64] = torch.stack(pieces, dim=2).cpu().numpy()
        return gathered

    def _report(self, load_MLSE: npt.NDArray[np.int64], *, step: int) -> None:
        imbalance_ML = rank_imbalance(load_MLSE, self._base)
        totals = torch.tensor([imbalance_ML.sum(), imbalance_ML.size], dtype=torch.float64, device=self._device)
        peak = torch.tensor([imbalance_ML.max(initial=1.0)], dtype=torch.float64, device=self._device)
        dist.all_reduce(totals)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if self._info.index == 0 and self._info.rank_in_group == 0:
            # Every rank of a group adds the same numbers, so the ratio is that of the groups.
            self._balance.add(step=step, total=float(totals[0]), count=int(totals[1]), peak=float(peak))

    def _record(self, load_MLSE: npt.NDArray[np.int64], *, step: int, name: str) -> PassRecord:
        # Groups other than the first write passes of their own names, so that writers never meet.
        suffix = f".g{self._info.index}" if self._info.index else ""
        homes = np.broadcast_to(self._base.home_E, (len(self._moe_layers), self._experts))
        return PassRecord(name=f"{name}{suffix}", step=step, load_MLSE=load_MLSE, home_LE=homes)
