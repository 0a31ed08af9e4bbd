"""Which checkpoint is the newest that a job could continue from.

veRL writes `latest_checkpointed_iteration.txt` after everything of a checkpoint is on disk, so this file, not the
newest directory, tells what is complete.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from foremoe_operator.api.progress import CheckpointProgress

MARKER_FILE = "latest_checkpointed_iteration.txt"


def newest(directory: Path) -> CheckpointProgress | None:
    """The newest complete checkpoint below `directory`; None if there is none."""
    marker = directory / MARKER_FILE
    try:
        step = int(marker.read_text().strip())
        written = marker.stat().st_mtime
    except (OSError, ValueError):
        return None
    path = directory / f"global_step_{step}"
    if not path.is_dir():
        return None
    return CheckpointProgress(step=step, path=str(path), time=datetime.fromtimestamp(written, UTC))
