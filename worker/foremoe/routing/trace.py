"""Traces: the expert loads of every pass of an RL run, on disk.

The worker that trains writes a trace, the planner and `foremoe simulate` read it, possibly while the
run goes on. So a trace is a directory with one small header and one file per pass; a file appears by
rename when it is complete, and a killed writer leaves all earlier passes readable. Inside a pass every
layer is a compressed array of its own: a reader that goes layer by layer holds one layer of one pass
in memory, whatever the size of the model. `docs/trace-format.md` is the specification.

A *pass* is one walk over micro-steps with constant weights (`old_log_prob`, `ref`, `update_0`, ...);
(step, name) identifies it. Appending the same pair again replaces it, and a run that resumes at step N
passes `resume_step=N` to drop what its predecessor wrote from N on.

Always: counts are exact non-negative integers; only recorded rows are counted; nothing in a file is
trusted before its shape and type are checked. Files are plain zip archives of npy members, so
`numpy.load` opens them without this package.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foremoe.errors import TraceError
from foremoe.routing.trace_files import (
    FORMAT_NAME,
    FORMAT_VERSION,
    HEADER_FILE,
    MAX_MICRO_STEPS,
    PASS_NAME,
    READ_ERRORS,
    Int32Array,
    Int64Array,
    PassInfo,
    PassRecord,
    TraceMeta,
    int64,
    list_passes,
    read_array,
    read_header,
    shape_text,
    write_array,
    write_atomically,
)


class TraceWriter:
    """Appends passes to a trace directory, creating it if needed.

    Reopening an existing trace continues it; its header must have the same shape. `resume_step=N`
    first removes all passes of steps >= N. Several writers may share a directory as long as they write
    passes of different names. Raises TraceError if `path` holds something else.
    """

    def __init__(self, path: str | Path, meta: TraceMeta, *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        self.meta = meta
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"cannot create trace directory {self.path}: {error}") from error
        if (self.path / HEADER_FILE).exists():
            found = read_header(self.path)
            if not found.same_shape(meta):
                raise TraceError(
                    f"{self.path} is a trace of another shape ({shape_text(found)}, "
                    f"this run has {shape_text(meta)}); write to a new directory"
                )
        else:
            if any(self.path.iterdir()):
                raise TraceError(f"{self.path} is not empty and holds no {HEADER_FILE}")
            header = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **asdict(meta)}
            text = json.dumps(header, indent=2, sort_keys=True) + "\n"
            write_atomically(self.path / HEADER_FILE, lambda file: file.write(text.encode()))
        if resume_step is not None:
            self.truncate(resume_step)

    def truncate(self, step: int) -> None:
        """Remove all passes of RL steps >= `step`."""
        for info in list_passes(self.path):
            if info.step >= step:
                info.path.unlink(missing_ok=True)

    def append(self, record: PassRecord) -> PassInfo:
        """Write one pass; it becomes visible to readers when complete. Raises TraceError for bad shapes."""
        load_MLSE = np.asarray(record.load_MLSE)
        if load_MLSE.ndim != 4:
            raise TraceError(f"load must be [M, L, S, E], got shape {list(load_MLSE.shape)}")
        if load_MLSE.shape[1] != self.meta.layers:
            raise TraceError(f"load has {load_MLSE.shape[1]} layers, the trace {self.meta.layers}")
        return self.append_layers(
            record.name,
            record.step,
            (load_MLSE[:, layer] for layer in range(self.meta.layers)),
            home_LE=record.home_LE,
            executed_MLR=record.executed_MLR,
        )

    def append_layers(
        self,
        name: str,
        step: int,
        load_MSE_of_layers: Iterable[npt.NDArray[Any]],
        *,
        home_LE: npt.NDArray[Any] | None = None,
        executed_MLR: npt.NDArray[Any] | None = None,
    ) -> PassInfo:
        """Like `append`, with one array [M, S, E] per layer, so that a pass is never whole in memory."""
        if not PASS_NAME.match(name):
            raise TraceError(f"pass name {name!r} must match {PASS_NAME.pattern}")
        if isinstance(step, bool) or not 0 <= int(step) < 10**8:
            raise TraceError(f"step must be in [0, 10^8), got {step!r}")
        of_step = [info for info in list_passes(self.path) if info.step == step]
        old = [info for info in of_step if info.name == name]
        sequence = old[0].sequence if old else max((i.sequence for i in of_step), default=-1) + 1
        target = self.path / f"{int(step):08d}-{sequence:04d}-{name}.npz"

        def write(file: io.BufferedWriter) -> None:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                self._write_members(archive, name, int(step), load_MSE_of_layers)
                if home_LE is not None:
                    homes = int64(home_LE, (self.meta.layers, self.meta.experts), "home_LE")
                    write_array(archive, "home_LE", homes)
                if executed_MLR is not None:
                    executed = np.asarray(executed_MLR)
                    if executed.ndim != 3 or executed.shape[1] != self.meta.layers:
                        raise TraceError("executed_MLR must be [M, L, R]")
                    write_array(archive, "executed_MLR", int64(executed, executed.shape, "executed_MLR"))

        write_atomically(target, write)
        return PassInfo(step=int(step), sequence=sequence, name=name, path=target)

    def _write_members(
        self,
        archive: zipfile.ZipFile,
        name: str,
        step: int,
        load_MSE_of_layers: Iterable[npt.NDArray[Any]],
    ) -> None:
        layers, micro_steps = 0, -1
        for layer, load_MSE in enumerate(load_MSE_of_layers):
            counts = self._checked_layer(np.asarray(load_MSE), layer, micro_steps)
            micro_steps = counts.shape[0]
            write_array(archive, f"load_{layer:03d}", counts)
            layers += 1
        if layers != self.meta.layers:
            raise TraceError(f"got {layers} layers, the trace has {self.meta.layers}")
        write_array(archive, "name", np.array(name))
        write_array(archive, "step", np.array(step, dtype=np.int64))
        write_array(archive, "micro_steps", np.array(micro_steps, dtype=np.int64))

    def _checked_layer(self, load_MSE: npt.NDArray[Any], layer: int, micro_steps: int) -> Int32Array:
        expected = (self.meta.source_ranks, self.meta.experts)
        if load_MSE.ndim != 3 or load_MSE.shape[1:] != expected:
            raise TraceError(
                f"load must be [M, {expected[0]}, {expected[1]}], got {list(load_MSE.shape)}",
                layer=layer,
            )
        if layer >= self.meta.layers:
            raise TraceError(f"more layers than the trace's {self.meta.layers}", layer=layer)
        if micro_steps not in (-1, load_MSE.shape[0]) or load_MSE.shape[0] > MAX_MICRO_STEPS:
            raise TraceError(f"{load_MSE.shape[0]} micro-steps, the layers before have {micro_steps}", layer=layer)
        if not np.issubdtype(load_MSE.dtype, np.integer):
            raise TraceError(f"counts must be integers, got {load_MSE.dtype}", layer=layer)
        if load_MSE.size and (load_MSE.min() < 0 or load_MSE.max() > np.iinfo(np.int32).max):
            raise TraceError("counts must be in [0, 2^31)", layer=layer)
        return np.ascontiguousarray(load_MSE, dtype=np.int32)


class TraceReader:
    """Reads a trace directory, also while a run still writes it.

    `passes()` lists the directory anew on every call. Raises TraceError if `path` is no trace.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta = read_header(self.path)

    def passes(self) -> list[PassInfo]:
        """All complete passes, in order of step, then of writing."""
        return list_passes(self.path)

    def micro_steps(self, info: PassInfo) -> int:
        """Number of micro-steps of a pass; reads one number."""
        with self._open(info) as archive:
            value = int(read_array(archive, "micro_steps", np.dtype(np.int64), ()))
        if not 0 <= value <= MAX_MICRO_STEPS:
            raise TraceError(f"{info.path.name}: micro_steps is {value}")
        return value

    def load_layer(self, info: PassInfo, layer: int) -> Int32Array:
        """Counts of one layer of one pass: int32 [M, S, E]. Raises TraceError naming file and layer."""
        if not 0 <= layer < self.meta.layers:
            raise TraceError(f"no such layer, the trace has {self.meta.layers}", layer=layer)
        with self._open(info) as archive:
            return self._read_layer(archive, info, layer)

    def layers(self, info: PassInfo) -> Iterator[Int32Array]:
        """Counts of a pass, layer after layer: int32 [M, S, E] each; opens the file once."""
        with self._open(info) as archive:
            for layer in range(self.meta.layers):
                yield self._read_layer(archive, info, layer)

    def load(self, info: PassInfo) -> Int32Array:
        """Counts of a whole pass: int32 [M, L, S, E]."""
        return np.stack(list(self.layers(info)), axis=1)

    def home(self, info: PassInfo) -> Int64Array | None:
        """Homes while the pass ran, int64 [L, E]; None if not recorded."""
        shape = (self.meta.layers, self.meta.experts)
        return self._optional(info, "home_LE", shape)

    def executed(self, info: PassInfo) -> Int64Array | None:
        """Pairs each rank computed, int64 [M, L, R]; None if not recorded."""
        return self._optional(info, "executed_MLR", (None, self.meta.layers, None))

    def record(self, info: PassInfo) -> PassRecord:
        """A whole pass with everything recorded about it."""
        return PassRecord(
            name=info.name,
            step=info.step,
            load_MLSE=self.load(info),
            home_LE=self.home(info),
            executed_MLR=self.executed(info),
        )

    def _read_layer(self, archive: zipfile.ZipFile, info: PassInfo, layer: int) -> Int32Array:
        shape = (None, self.meta.source_ranks, self.meta.experts)
        try:
            counts = read_array(archive, f"load_{layer:03d}", np.dtype(np.int32), shape)
        except TraceError as error:
            raise TraceError(f"{info.path.name}: {error}", layer=layer) from error
        if counts.size and counts.min() < 0:
            raise TraceError(f"{info.path.name}: negative counts", layer=layer)
        return counts

    def _optional(self, info: PassInfo, member: str, shape: tuple[int | None, ...]) -> Int64Array | None:
        with self._open(info) as archive:
            if f"{member}.npy" not in archive.namelist():
                return None
            return read_array(archive, member, np.dtype(np.int64), shape)

    def _open(self, info: PassInfo) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(info.path)
        except READ_ERRORS as error:
            raise TraceError(f"{info.path} is no complete pass file: {error}") from error
