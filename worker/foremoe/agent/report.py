"""The last word of an agent: its state as the container's termination message, within the kubelet's 4096 bytes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from foremoe_operator.api.constants import ENV_TERMINATION_FILE, TERMINATION_FILE, TERMINATION_MAX_BYTES
from foremoe_operator.api.progress import Progress

logger = logging.getLogger(__name__)

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_LINE_CHARACTERS = 400


def default_file(environment: Mapping[str, str]) -> Path:
    """Where the report goes if nothing else is known."""
    return Path(environment.get(ENV_TERMINATION_FILE) or TERMINATION_FILE)


def write(path: Path, progress: Progress) -> None:
    """Write the report; a file that cannot be written is only logged, the exit code still tells the end."""
    try:
        path.write_bytes(render(progress))
    except OSError as error:
        logger.warning("cannot write the report to %s: %s", path, error)


def render(progress: Progress, *, limit: int = TERMINATION_MAX_BYTES) -> bytes:
    """The report as JSON of at most `limit` bytes: as many of the log's last lines as fit."""
    lines = clean(progress.log_tail.splitlines())
    while True:
        body = progress.model_copy(update={"log_tail": "\n".join(lines)})
        text = body.model_dump_json(by_alias=True, exclude_none=True).encode()
        if len(text) <= limit or not lines:
            return text
        # JSON escapes make a line longer than its characters, so approach the limit line by line.
        lines = lines[1:]


def clean(lines: list[str]) -> list[str]:
    """Lines without terminal escapes, each cut to a readable length."""
    return [_ESCAPES.sub("", line)[:_LINE_CHARACTERS] for line in lines]
