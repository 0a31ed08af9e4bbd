"""The trace format: what is written comes back, and nothing damaged is believed."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from foremoe.errors import TraceError
from foremoe.routing import PassRecord, TraceMeta, TraceReader, TraceWriter

META = TraceMeta(experts=8, layers=3, source_ranks=2, top_k=2, model="toy", created_by="test")


def record(name: str = "update_0", step: int = 1, micro_steps: int = 4, seed: int = 0) -> PassRecord:
    rng = np.random.default_rng(seed)
    return PassRecord(
        name=name,
        step=step,
        load_MLSE=rng.integers(0, 50, (micro_steps, 3, 2, 8)),
        home_LE=rng.integers(0, 2, (3, 8)),
        executed_MLR=rng.integers(0, 99, (micro_steps, 3, 2)),
    )


def steps(path: Path) -> list[tuple[int, str]]:
    return [(info.step, info.name) for info in TraceReader(path).passes()]


def test_round_trip(tmp_path: Path) -> None:
    written = record()
    TraceWriter(tmp_path / "t", META).append(written)
    reader = TraceReader(tmp_path / "t")
    (info,) = reader.passes()
    assert reader.meta == META
    assert reader.micro_steps(info) == 4
    back = reader.record(info)
    assert (back.name, back.step) == ("update_0", 1)
    np.testing.assert_array_equal(back.load_MLSE, written.load_MLSE)
    np.testing.assert_array_equal(back.home_LE, written.home_LE)
    np.testing.assert_array_equal(back.executed_MLR, written.executed_MLR)
    np.testing.assert_array_equal(reader.load_layer(info, 1), written.load_MLSE[:, 1])


def test_numpy_alone_can_read_a_pass(tmp_path: Path) -> None:
    info = TraceWriter(tmp_path, META).append(record())
    with np.load(info.path) as archive:
        assert archive["load_002"].dtype == np.int32
        assert str(archive["name"]) == "update_0"


def test_reader_sees_a_live_trace_and_passes_stay_ordered(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, META)
    reader = TraceReader(tmp_path)
    assert reader.passes() == []
    for step in (1, 2):
        for name in ("old_log_prob", "ref", "update_0", "update_1"):
            writer.append(record(name, step))
    names = ["old_log_prob", "ref", "update_0", "update_1"]
    assert steps(tmp_path) == [(step, name) for step in (1, 2) for name in names]
    assert len(reader.passes()) == 8


def test_resume_drops_later_steps_and_same_pass_is_replaced(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, META)
    for step in (1, 2, 3):
        writer.append(record(step=step))
    writer = TraceWriter(tmp_path, META, resume_step=2)
    assert steps(tmp_path) == [(1, "update_0")]
    again = record(step=1, micro_steps=2, seed=7)
    writer.append(again)
    assert steps(tmp_path) == [(1, "update_0")]
    np.testing.assert_array_equal(TraceReader(tmp_path).load(TraceReader(tmp_path).passes()[0]), again.load_MLSE)


def test_killed_writer_leaves_complete_passes_only(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, META)
    writer.append(record())

    def dies() -> object:
        yield np.zeros((1, 2, 8), dtype=np.int32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.append_layers("update_0", 2, dies())  # type: ignore[arg-type]
    (tmp_path / ".00000002-0000-update_0.npz.77.tmp").write_bytes(b"PK half")
    assert steps(tmp_path) == [(1, "update_0")]
    TraceWriter(tmp_path, META).append(record(step=2))
    assert steps(tmp_path) == [(1, "update_0"), (2, "update_0")]


@pytest.mark.parametrize("keep", [0, 1, 30, 200, 0.5, 0.9, -1])
def test_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    info = TraceWriter(tmp_path, META).append(record())
    data = info.path.read_bytes()
    cut = int(keep * len(data)) if isinstance(keep, float) else keep
    info.path.write_bytes(data[:cut])
    with pytest.raises(TraceError):
        TraceReader(tmp_path).load(info)


def test_flipped_bytes_never_give_other_counts(tmp_path: Path) -> None:
    written = record()
    info = TraceWriter(tmp_path, META).append(written)
    good = info.path.read_bytes()
    for position in range(0, len(good), 13):
        bad = bytearray(good)
        bad[position] ^= 0x5A
        info.path.write_bytes(bytes(bad))
        try:
            got = TraceReader(tmp_path).load(info)
        except TraceError:
            continue
        np.testing.assert_array_equal(got, written.load_MLSE)


def test_header_that_promises_too_much_is_refused_without_allocating(tmp_path: Path) -> None:
    info = TraceWriter(tmp_path, META).append(record())
    with zipfile.ZipFile(info.path, "w") as archive, archive.open("load_000.npy", "w") as file:
        header = {"descr": "<i4", "fortran_order": False, "shape": (10**12, 2, 8)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(TraceError, match="layer 0"):
        TraceReader(tmp_path).load_layer(info, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"format": "other"}',
        json.dumps({"format": "foremoe-trace", "version": 99}),
        json.dumps({"format": "foremoe-trace", "version": 1, "experts": 8}),
        json.dumps({"format": "foremoe-trace", "version": 1, "experts": -1, "layers": 1,
                    "source_ranks": 1, "top_k": 1}),
        json.dumps({"format": "foremoe-trace", "version": 1, "experts": "8", "layers": 1,
                    "source_ranks": 1, "top_k": 1}),
    ],
)  # fmt: skip
def test_foreign_header_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(TraceError):
        TraceReader(tmp_path)


def test_no_trace_at_all(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        TraceReader(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TraceError, match="not empty"):
        TraceWriter(tmp_path, META)


@pytest.mark.parametrize(
    "load",
    [
        np.zeros((1, 3, 2, 9), dtype=int),
        np.zeros((1, 2, 2, 8), dtype=int),
        np.zeros((1, 3, 2, 8)),
        np.zeros((3, 2, 8), dtype=int),
        np.full((1, 3, 2, 8), -1),
        np.full((1, 3, 2, 8), 2**31),
    ],
)
def test_wrong_counts_are_refused_and_leave_no_file(tmp_path: Path, load: np.ndarray) -> None:
    writer = TraceWriter(tmp_path, META)
    with pytest.raises(TraceError):
        writer.append(PassRecord(name="ref", step=0, load_MLSE=load))
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_other_shape_is_refused_on_reopen(tmp_path: Path) -> None:
    TraceWriter(tmp_path, META)
    other = TraceMeta(experts=8, layers=4, source_ranks=2, top_k=2)
    with pytest.raises(TraceError, match="another shape"):
        TraceWriter(tmp_path, other)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a-b", "x" * 65])
def test_pass_names_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match="pass name"):
        TraceWriter(tmp_path, META).append(record(name))


def test_missing_layer_is_refused(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, META)
    with pytest.raises(TraceError, match="2 layers"):
        writer.append_layers("ref", 0, iter([np.zeros((1, 2, 8), dtype=int)] * 2))
