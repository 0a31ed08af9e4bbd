"""Reading counts that other tools recorded: one npz per pass, as an early capture prototype wrote them.

Each file holds `load_MLSE` (integer [micro_steps, layers, source_ranks, experts]), `name` and `step`, and may hold
`home_E` and `executed_MLR`. Files are taken in order of name. Passes of the reference model, recorded with
step -1, get the step of the pass before them.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from foremoe.errors import TraceError
from foremoe.routing.trace import TraceWriter
from foremoe.routing.trace_files import PassRecord, TraceMeta


def convert_npz_passes(
    source: str | Path, target: str | Path, *, top_k: int, model: str = "", steps: range | None = None
) -> int:
    """Write a trace from a directory of npz passes; returns the number of passes.

    `steps` keeps only some RL steps. Raises TraceError for files that hold no such counts or counts of
    different shapes.
    """
    writer: TraceWriter | None = None
    last_step, written = 0, 0
    for path in sorted(Path(source).glob("*.npz")):
        record = _read(path, last_step)
        if record is None:
            continue
        last_step = record.step
        if steps is not None and record.step not in steps:
            continue
        if writer is None:
            _, layers, ranks, experts = record.load_MLSE.shape
            meta = TraceMeta(
                experts=experts,
                layers=layers,
                source_ranks=ranks,
                top_k=top_k,
                model=model,
                created_by="foremoe trace convert",
            )
            writer = TraceWriter(target, meta)
        writer.append(record)
        written += 1
    if writer is None:
        raise TraceError(f"{source} holds no npz file with load_MLSE for the steps asked for")
    return written


def _read(path: Path, last_step: int) -> PassRecord | None:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if "load_MLSE" not in archive:
                return None
            load = archive["load_MLSE"]
            step = int(archive["step"]) if "step" in archive else last_step
            home_E, executed = archive.get("home_E"), archive.get("executed_MLR")
            name = str(archive["name"]) if "name" in archive else "pass"
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path}: {error}") from error
    if load.ndim != 4:
        raise TraceError(f"{path}: load_MLSE must have 4 dimensions, got {load.ndim}")
    return PassRecord(
        name=name,
        step=last_step if step < 0 else step,
        load_MLSE=load,
        home_LE=None if home_E is None else np.tile(home_E, (load.shape[1], 1)),
        executed_MLR=executed,
    )
