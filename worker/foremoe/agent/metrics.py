"""The agent's Prometheus metrics; every name is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from foremoe.agent.tracker import Tracker
from foremoe_operator.api.constants import Stage

STEP: Final = "foremoe_step"
TOTAL_STEPS: Final = "foremoe_total_steps"
REWARD: Final = "foremoe_reward"
STEP_SECONDS: Final = "foremoe_step_seconds"
STAGE_SECONDS: Final = "foremoe_stage_seconds"
BALANCE_MEAN: Final = "foremoe_rank_load_imbalance_mean"
BALANCE_MAX: Final = "foremoe_rank_load_imbalance_max"
WORKERS_JOINED: Final = "foremoe_workers_joined"
STAGE: Final = "foremoe_stage"
CHECKPOINT_STEP: Final = "foremoe_checkpoint_step"
JOB: Final = "foremoe_job"

_TIMING_PREFIX = "timing_s/"


class ProgressCollector(Collector):
    """Exports the tracker's state as it is when scraped."""

    def __init__(self, tracker: Tracker, *, job: str, namespace: str) -> None:
        self._tracker = tracker
        self._labels = {"job": job, "namespace": namespace}

    def collect(self) -> Iterator[Metric]:
        """All metrics; those that are not known yet are left out."""
        progress = self._tracker.progress
        yield InfoMetricFamily(JOB, "The job this agent runs.", value=self._labels)
        for name, text, value in (
            (STEP, "Steps finished.", progress.step),
            (TOTAL_STEPS, "Steps to train for.", progress.total_steps),
            (WORKERS_JOINED, "Workers whose Ray node is up.", progress.workers_joined),
            (REWARD, "Mean reward of the last finished step.", progress.reward),
            (STEP_SECONDS, "Wall time of the last finished step.", progress.step_seconds),
            (BALANCE_MEAN, "Max over mean rank load, mean over layers and micro-steps, base placement.",
             progress.balance.mean if progress.balance else None),
            (BALANCE_MAX, "Max over mean rank load of the worst layer and micro-step, base placement.",
             progress.balance.max if progress.balance else None),
            (CHECKPOINT_STEP, "Step of the newest complete checkpoint.",
             progress.checkpoint.step if progress.checkpoint else None),
        ):  # fmt: skip
            if value is not None:
                yield GaugeMetricFamily(name, text, value=float(value))
        stages = GaugeMetricFamily(STAGE, "1 for the stage the run is in.", labels=["stage"])
        for stage in Stage:
            stages.add_metric([str(stage)], float(stage is progress.stage))
        yield stages
        seconds = GaugeMetricFamily(STAGE_SECONDS, "Wall time of veRL's stages in the last step.", labels=["stage"])
        for name, number in self._tracker.metrics.items():
            if name.startswith(_TIMING_PREFIX):
                seconds.add_metric([name.removeprefix(_TIMING_PREFIX)], number)
        yield seconds


def render(collector: ProgressCollector) -> bytes:
    """The text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
