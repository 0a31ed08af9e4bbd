"""From the paths of a cluster to paths on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foremoe.cli import local_volumes
from foremoe.errors import LaunchError
from foremoe_operator.api.job import ForeMoEJobSpec

PLACES = {"/shared": Path("/home/me/vol"), "/shared/big": Path("/mnt/big")}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/shared/model", "/home/me/vol/model"),
        ("/shared", "/home/me/vol"),
        ("/shared/big/x", "/mnt/big/x"),
        ("/sharedother/x", "/sharedother/x"),
        ("a.b=/shared/x", "a.b=/home/me/vol/x"),
        ("a.b=['/shared/x','/shared/big/y']", "a.b=['/home/me/vol/x','/mnt/big/y']"),
        ("a.b=[/shared/x,/shared/y]", "a.b=[/home/me/vol/x,/home/me/vol/y]"),
        ("+a.path=file:///shared/x", "+a.path=file:///shared/x"),
        ("see /shared/x here", "see /home/me/vol/x here"),
        ("/data/shared/x", "/data/shared/x"),
        ("lr=1e-3", "lr=1e-3"),
    ],
)
def test_only_paths_below_a_mount_are_rewritten(text: str, expected: str) -> None:
    assert local_volumes.rewrite(text, PLACES) == expected


def test_without_volumes_nothing_changes() -> None:
    assert local_volumes.rewrite("/shared/x", {}) == "/shared/x"


def spec() -> ForeMoEJobSpec:
    fields: dict[str, Any] = {
        "image": "worker:1",
        "model": {"path": "/shared/model"},
        "data": {"trainFiles": ["/shared/train.parquet"], "valFiles": ["/shared/val.parquet"]},
        "totalSteps": 1,
        "workers": {"replicas": 1, "gpusPerWorker": 1},
        "volumes": [{"name": "shared", "claimName": "claim", "mountPath": "/shared"}],
        "checkpoint": {"path": "/shared/ckpt"},
        "trace": {"path": "/shared/trace"},
        "args": ["x.file=/shared/f"],
        "env": [{"name": "CACHE", "value": "/shared/cache"}],
    }
    return ForeMoEJobSpec.model_validate(fields)


def test_every_path_of_a_job_moves(tmp_path: Path) -> None:
    places = local_volumes.directories(spec().volumes, {"claim": tmp_path})
    local = local_volumes.localize(spec(), places)
    assert local.model.path == f"{tmp_path}/model"
    assert local.data.train_files == [f"{tmp_path}/train.parquet"]
    assert local.data.val_files == [f"{tmp_path}/val.parquet"]
    assert local.checkpoint.path == f"{tmp_path}/ckpt"
    assert local.trace is not None and local.trace.path == f"{tmp_path}/trace"
    assert local.args == [f"x.file={tmp_path}/f"]
    assert local.env[0].value == f"{tmp_path}/cache"
    assert "/shared/" not in local.model_copy(update={"volumes": []}).model_dump_json()


def test_a_claim_has_a_directory_of_its_name_by_default() -> None:
    places = local_volumes.directories(spec().volumes, {})
    assert places == {"/shared": Path(".foremoe/volumes/claim").absolute()}


def test_a_mapping_of_no_claim_is_refused() -> None:
    with pytest.raises(LaunchError, match="it has claim"):
        local_volumes.directories(spec().volumes, {"other": Path("x")})


@pytest.mark.parametrize("pair", ["claim", "=dir", "claim="])
def test_a_mapping_needs_both_sides(pair: str) -> None:
    with pytest.raises(LaunchError, match="CLAIM=DIRECTORY"):
        local_volumes.parse_mappings([pair])
