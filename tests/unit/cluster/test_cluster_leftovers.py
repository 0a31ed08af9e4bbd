"""Finding what a run left: processes by mark, mounts below our folder, cgroups; and the proof by snapshots."""

import os
import subprocess
from pathlib import Path

import pytest

from foremoe_cluster import cgroups, leftovers, processes, snapshot
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.leftovers import Leftovers, mounts_below, remove_each
from foremoe_cluster.settings import PROCESS_MARK, STATE

MOUNTS = f"""\
/dev/vda / ext4 rw 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0
tmpfs {STATE}/a tmpfs rw 0 0
overlay {STATE}/a/with\\040space overlay rw 0 0
overlay {STATE}/build/storage/overlay ext4 rw 0 0
tmpfs {STATE}-other tmpfs rw 0 0
"""


def test_mounts_are_found_inner_ones_first() -> None:
    assert mounts_below(MOUNTS, STATE, without=[STATE / "build"]) == [f"{STATE}/a/with space", f"{STATE}/a"]


def test_all_cgroup_hierarchies_are_found() -> None:
    assert cgroups.hierarchies(MOUNTS) == [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/unified")]


def test_the_mark_is_read_from_the_environment() -> None:
    assert processes.marked(f"A=1\0{PROCESS_MARK}=node1\0B=2\0".encode()) == "node1"
    assert processes.marked(f"X{PROCESS_MARK}=node1\0".encode()) is None
    assert processes.marked(b"") is None


def test_marked_processes_are_found_and_ended() -> None:
    role = f"test-{os.getpid()}"
    argv = ["sh", "-c", "sleep 60 & echo started; wait"]
    child = subprocess.Popen(argv, env={PROCESS_MARK: role, "PATH": os.environ["PATH"]}, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    try:
        ours = [pid for pid, found in processes.find().items() if found == role]
        assert len(ours) == 2 and child.pid in ours
        assert processes.roles()[role] == child.pid
        processes.kill(ours)
        assert processes.wait_gone(ours, 5.0) == []
    finally:
        child.stdout.close()
        child.kill()
        child.wait()


def test_killing_who_is_gone_is_no_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    processes.kill([child.pid])
    assert processes.alive([child.pid]) == []


def test_the_summary_names_what_there_is() -> None:
    left = Leftovers(
        processes={1: "etcd", 2: "node1"}, contained=frozenset({2, 3}), links=("fm0",), guards=("foremoe",)
    )
    assert left
    assert left.summary() == "3 processes, 1 links, 1 firewall tables"
    assert not Leftovers()
    assert Leftovers().summary() == "nothing"


def test_kept_folders_are_no_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "STATE", tmp_path)
    monkeypatch.setattr(leftovers, "KEPT", (tmp_path / "images",))
    for name in ("images", "etcd", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "lock").touch()
    assert [path.name for path in leftovers._files()] == ["etcd", "run"]


def test_only_mount_points_that_we_made_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = tuple(tmp_path / name for name in ("theirs", "ours", "used"))
    monkeypatch.setattr(leftovers, "MOUNT_POINTS", points)
    monkeypatch.setattr(leftovers, "MADE", tmp_path / "made")
    points[0].mkdir()
    leftovers.make_mount_points()
    assert all(point.is_dir() for point in points)
    (points[2] / "by someone else").touch()
    leftovers._remove_mount_points()
    assert [point.exists() for point in points] == [True, False, True]
    assert not leftovers.MADE.exists()


def test_what_goes_by_itself_between_look_and_removal_is_no_error() -> None:
    there = ["fm-node1", "fm0"]

    def remove(name: str) -> None:
        there.clear()  # the namespace died meanwhile and took its end of the cable along
        raise ClusterError(f"Cannot find device {name}")

    remove_each("links", lambda: list(there), remove)
    assert there == []


def test_what_is_busy_at_first_is_tried_again() -> None:
    there, refusals = ["group"], 3

    def remove(name: str) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals:
            raise OSError(16, "Device or resource busy", name)
        there.remove(name)

    remove_each("cgroups", lambda: list(there), remove)
    assert there == []


@pytest.mark.parametrize("speaks", [True, False])
def test_what_stays_is_named_with_its_last_error(speaks: bool) -> None:
    def remove(name: str) -> None:
        if speaks:
            raise ClusterError("Device or resource busy")

    with pytest.raises(ClusterError, match="cgroups that stay: a, b" + ("\nDevice" if speaks else "$")):
        remove_each("cgroups", lambda: ["a", "b"], remove, seconds=0.1)


def test_a_difference_names_every_fact() -> None:
    before = snapshot.Snapshot(categories={"links": {"lo": "", "eth0": ""}, "sysctls": {"kernel/panic": "1"}})
    after = snapshot.Snapshot(categories={"links": {"lo": "", "fm0": ""}, "sysctls": {"kernel/panic": "10"}})
    assert snapshot.difference(before, after) == [
        "links: eth0 (gone)",
        "links: fm0 (new)",
        "sysctls: kernel/panic (1 -> 10)",
    ]
    assert snapshot.difference(before, before) == []


def test_counters_and_clocks_are_no_facts() -> None:
    line = "fe80::/64 dev fm0 proto kernel metric 256 expires 29sec pref medium"
    assert list(snapshot._lines(line)) == ["fe80::/64 dev fm0 proto kernel metric 256"]
