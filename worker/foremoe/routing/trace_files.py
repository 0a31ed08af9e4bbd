"""Files of a trace: header, names, arrays. What they mean and what always holds is told in `trace`."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foremoe.errors import TraceError

FORMAT_NAME = "foremoe-trace"
FORMAT_VERSION = 1
HEADER_FILE = "trace.json"

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

PASS_FILE = re.compile(r"^(\d{8})-(\d{4})-([A-Za-z0-9_.]{1,64})\.npz$")
PASS_NAME = re.compile(r"^[A-Za-z0-9_.]{1,64}$")
MAX_HEADER_BYTES = 1 << 20
MAX_MICRO_STEPS = 1 << 16
# RuntimeError: what zipfile raises for flags it does not know, encryption for example.
READ_ERRORS = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, KeyError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class TraceMeta:
    """Header of a trace: what every pass of it has in common."""

    experts: int
    layers: int
    """MoE layers, in model order; layer 0 is the first MoE layer."""
    source_ranks: int
    """Ranks whose tokens are counted apart (the EP group)."""
    top_k: int
    model: str = ""
    """Free text, for example the model's directory or hub name."""
    created_by: str = ""
    extra: dict[str, str] = field(default_factory=dict)
    """Free facts about the run (job, generator settings); never interpreted."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("experts", 1, 1 << 16),
            ("layers", 1, 1 << 12),
            ("source_ranks", 1, 1 << 16),
            ("top_k", 1, 1 << 10),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise TraceError(f"{name} must be an integer in [{least}, {most}], got {value!r}")
        if self.top_k > self.experts:
            raise TraceError(f"top_k {self.top_k} exceeds the number of experts {self.experts}")

    def same_shape(self, other: TraceMeta) -> bool:
        """True if passes of `other` fit into this trace."""
        return all(
            getattr(self, name) == getattr(other, name) for name in ("experts", "layers", "source_ranks", "top_k")
        )


@dataclass(frozen=True, kw_only=True)
class PassInfo:
    """One pass as the directory lists it; nothing has been read yet."""

    step: int
    sequence: int
    name: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """All counts of one pass."""

    name: str
    """Kind of pass: letters, digits, `_` and `.`, for example `old_log_prob`, `ref`, `update_0`."""
    step: int
    """RL step, from 0 or 1 as the trainer counts."""
    load_MLSE: npt.NDArray[Any]
    """Integer [micro_steps, layers, source_ranks, experts]: recorded token-expert pairs."""
    home_LE: npt.NDArray[Any] | None = None
    """Home rank of every expert while the pass ran, int [layers, experts]; None = not known."""
    executed_MLR: npt.NDArray[Any] | None = None
    """Pairs each rank did compute, int [micro_steps, layers, ranks]; None = not known."""


def shape_text(meta: TraceMeta) -> str:
    """The sizes of a trace, for messages."""
    return f"{meta.experts} experts, {meta.layers} layers, {meta.source_ranks} source ranks, top-{meta.top_k}"


def list_passes(path: Path) -> list[PassInfo]:
    """All complete passes of a trace, in order."""
    found = []
    for entry in os.scandir(path):
        match = PASS_FILE.match(entry.name)
        if match:
            step, sequence, name = match.groups()
            found.append(PassInfo(step=int(step), sequence=int(sequence), name=name, path=Path(entry.path)))
    return sorted(found, key=lambda info: (info.step, info.sequence, info.name))


def read_header(path: Path) -> TraceMeta:
    """The checked header; TraceError names what is wrong with it."""
    file = path / HEADER_FILE
    try:
        if file.stat().st_size > MAX_HEADER_BYTES:
            raise TraceError(f"{file} is too large to be a trace header")
        header = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path} is no readable trace: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT_NAME:
        raise TraceError(f"{file} is not the header of a {FORMAT_NAME}")
    if header.get("version") != FORMAT_VERSION:
        raise TraceError(
            f"{file} has format version {header.get('version')!r}, this release reads "
            f"{FORMAT_VERSION}; use the release that wrote it"
        )
    known = {entry.name for entry in fields(TraceMeta)}
    try:
        return TraceMeta(**{key: value for key, value in header.items() if key in known})
    except TypeError as error:
        raise TraceError(f"{file}: {error}") from error


def int64(values: npt.NDArray[Any], shape: tuple[int, ...], what: str) -> Int64Array:
    """The integers as int64; TraceError for another shape or type."""
    array = np.asarray(values)
    if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
        raise TraceError(f"{what} must be integer {list(shape)}, got {array.dtype} {list(array.shape)}")
    if array.size and array.min() < 0:
        raise TraceError(f"{what} must not be negative")
    # A broadcast array would be written in Fortran order, which the reader refuses.
    return np.ascontiguousarray(array, dtype=np.int64)


def write_array(archive: zipfile.ZipFile, member: str, array: npt.NDArray[Any]) -> None:
    """Add an array to a pass's archive."""
    with archive.open(f"{member}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def read_array(
    archive: zipfile.ZipFile, member: str, dtype: np.dtype[Any], shape: tuple[int | None, ...]
) -> npt.NDArray[Any]:
    """One member, with its header checked before any memory is taken for its data."""
    try:
        with archive.open(f"{member}.npy") as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"npy version {version}")
            found, fortran, found_dtype = np.lib.format.read_array_header_1_0(file)
            fits = len(found) == len(shape) and all(
                want is None or want == have for want, have in zip(shape, found, strict=True)
            )
            if not fits or fortran or found_dtype != dtype:
                raise ValueError(f"expected {dtype} {list(shape)}, found {found_dtype} {list(found)}")
            size = int(np.prod(found, dtype=object)) * dtype.itemsize
            if size > archive.getinfo(f"{member}.npy").file_size:
                raise ValueError("array is shorter than its header says")
            data = file.read(size)
            # Reading to the end makes zipfile check the CRC of the member.
            if len(data) != size or file.read(1):
                raise ValueError("array and header disagree in length")
    except READ_ERRORS as error:
        raise TraceError(f"member {member} is missing or damaged: {error}") from error
    return np.frombuffer(data, dtype=dtype).reshape(found)


def write_atomically(target: Path, write: Callable[[io.BufferedWriter], object]) -> None:
    """Write to a temporary name, sync, rename; the target is complete or absent, also after a crash."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise TraceError(f"cannot write {target}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
