"""The image's compiled kernels are used from a writable copy."""

from __future__ import annotations

from pathlib import Path

from foremoe.agent.kernels import ENV_CACHE, cache_environment


def test_the_cache_of_the_image_is_copied(tmp_path: Path) -> None:
    baked, work = tmp_path / "baked", tmp_path / "work"
    (baked / "planner").mkdir(parents=True)
    (baked / "planner" / "kernel.nbi").write_bytes(b"x")
    work.mkdir()
    for _ in range(2):
        environment = cache_environment({}, work, baked=baked)
        assert environment == {ENV_CACHE: str(work / "numba-cache")}
    assert (work / "numba-cache" / "planner" / "kernel.nbi").read_bytes() == b"x"


def test_without_a_cache_or_with_ones_own_nothing_changes(tmp_path: Path) -> None:
    assert cache_environment({}, tmp_path, baked=tmp_path / "none") == {}
    assert cache_environment({ENV_CACHE: "/mine"}, tmp_path, baked=tmp_path) == {}


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert cache_environment({}, tmp_path / "file", baked=tmp_path) == {}
