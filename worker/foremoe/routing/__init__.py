"""Recorded expert choices: counting them, and the trace format that keeps them."""

from foremoe.routing.counting import (
    count_experts,
    rank_imbalance,
    rank_loads,
    recorded_rows,
)
from foremoe.routing.trace import TraceReader, TraceWriter
from foremoe.routing.trace_files import PassInfo, PassRecord, TraceMeta

__all__ = [
    "PassInfo",
    "PassRecord",
    "TraceMeta",
    "TraceReader",
    "TraceWriter",
    "count_experts",
    "rank_imbalance",
    "rank_loads",
    "recorded_rows",
]
