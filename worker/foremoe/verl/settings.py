"""What the processes of a run are told by environment; the agent sets it, a run by hand may set it too.

The environment is the only channel that reaches every veRL process before its first import. All of it is optional:
without a trace directory no trace is kept, without an events address nothing is reported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foremoe.errors import LaunchError
from foremoe_operator.api.constants import (
    ENV_EVENTS_TOKEN,
    ENV_EVENTS_URL,
    ENV_EXPERT_PARALLEL,
    ENV_JOB,
    ENV_PLANNER_CONFIG,
    ENV_TRACE_DIRECTORY,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of this process."""

    trace_directory: Path | None = None
    expert_parallel: int | None = None
    """Size of an EP group; the world size must be a multiple of it. 1: experts are left to FSDP. None: as large as the
    number of ranks and experts allows."""
    planner_config: str = ""
    """Planner settings as JSON, or the path of a JSON file with them; the planner's own defaults if empty."""
    events_url: str | None = None
    events_token: str = ""
    job: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings. Raises LaunchError if the expert-parallel size is no number."""
        values = os.environ if environment is None else environment
        trace = values.get(ENV_TRACE_DIRECTORY)
        return cls(
            trace_directory=Path(trace) if trace else None,
            expert_parallel=_size(values.get(ENV_EXPERT_PARALLEL, "")),
            planner_config=values.get(ENV_PLANNER_CONFIG, "").strip(),
            events_url=values.get(ENV_EVENTS_URL) or None,
            events_token=values.get(ENV_EVENTS_TOKEN, ""),
            job=values.get(ENV_JOB, ""),
        )


def _size(text: str) -> int | None:
    if not text.strip():
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise LaunchError(f"{ENV_EXPERT_PARALLEL} must be a number of ranks, 1 or more, not {text!r}")
    return int(text)
