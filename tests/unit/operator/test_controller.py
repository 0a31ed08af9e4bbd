"""The loop around the core against an API server that misbehaves on demand: what a real one does too rarely to test."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
from tests.unit.operator.builders import UID, manifest

from foremoe_operator.api.constants import Stage
from foremoe_operator.api.progress import Progress
from foremoe_operator.core.model import Announce, Limits, Pod
from foremoe_operator.kube.client import KubeError
from foremoe_operator.kube.controller import Controller
from foremoe_operator.kube.convert import Key, StoredJob, job_from, owner_uid, pod_from

KEY = ("ns", "tiny")


class Cluster:
    """An API server and its watches in one: objects in a dict, faults as one-time exceptions by method name."""

    def __init__(self) -> None:
        metadata = {"name": "tiny", "namespace": "ns", "uid": UID, "generation": 1, "resourceVersion": "1"}
        self.job_raw: dict[str, Any] | None = {**manifest(), "metadata": metadata}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.faults: dict[str, list[KubeError]] = {}
        self.hidden: set[tuple[str, str]] = set()
        self.writes: list[str] = []
        self.old_job: dict[str, Any] | None = None

    def _maybe_fail(self, method: str) -> None:
        if self.faults.get(method):
            raise self.faults[method].pop(0)

    # what the watches have seen
    def job(self, key: Key) -> StoredJob | None:
        raw = self.old_job or self.job_raw
        return job_from(raw) if raw is not None and key == KEY else None

    def pods(self, key: Key) -> Iterable[Pod]:
        return [pod_from(raw) for each, raw in self.objects.items() if each[0] == "Pod" and each not in self.hidden]

    def children(self, key: Key) -> Iterable[tuple[str, str, str]]:
        return [
            (*each, owner_uid(raw))
            for each, raw in self.objects.items()
            if each[0] != "Pod" and each not in self.hidden
        ]

    # the API server
    async def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._maybe_fail("create")
        key = (manifest["kind"], manifest["metadata"]["name"])
        if key in self.objects:
            raise KubeError("exists", code=409, reason="AlreadyExists")
        self.writes.append("/".join(key))
        self.objects[key] = made = copy.deepcopy(manifest)
        made["metadata"] |= {"uid": f"uid-{key[1]}", "creationTimestamp": "2026-07-01T12:00:00Z"}
        return made

    async def read(self, manifest: dict[str, Any]) -> dict[str, Any]:
        return self.objects[manifest["kind"], manifest["metadata"]["name"]]

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        return self.objects[manifest["kind"], manifest["metadata"]["name"]]

    async def pods_of(self, namespace: str, job: str) -> list[dict[str, Any]]:
        return [raw for key, raw in self.objects.items() if key[0] == "Pod"]

    async def delete_pod(self, namespace: str, name: str, uid: str) -> None:
        self._maybe_fail("delete_pod")
        if self.objects["Pod", name]["metadata"]["uid"] == uid:
            del self.objects["Pod", name]

    async def write_status(self, job: dict[str, Any]) -> dict[str, Any]:
        self._maybe_fail("write_status")
        assert self.job_raw is not None
        stored = self.job_raw["metadata"]
        if job["metadata"]["resourceVersion"] != stored["resourceVersion"]:
            raise KubeError("conflict", code=409, reason="Conflict")
        self.writes.append("status")
        version = str(int(stored["resourceVersion"]) + 1)
        self.job_raw = {**self.job_raw, "metadata": {**stored, "resourceVersion": version}, "status": job["status"]}
        return self.job_raw

    # the kubelet
    def run(self, **head_state: Any) -> None:
        for (kind, name), raw in self.objects.items():
            if kind == "Pod":
                state = head_state if head_state and "head" in name else {"running": {}}
                raw["spec"]["nodeName"] = "node1"
                raw["status"] = {
                    "phase": "Running",
                    "podIP": "10.0.0.1",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [{"state": state}],
                }


class Agents:
    def __init__(self) -> None:
        self.report: Progress | None = Progress(stage=Stage.ROLLOUT, step=1, workers_joined=2)

    async def progress(self, address: str) -> Progress | None:
        return self.report


class World:
    def __init__(self) -> None:
        self.cluster, self.agents = Cluster(), Agents()
        self.announced: list[Announce] = []
        self.restart()

    def restart(self) -> None:
        self.controller = Controller(
            cache=self.cluster,
            client=self.cluster,  # type: ignore[arg-type]  # the same calls
            agents=self.agents,  # type: ignore[arg-type]
            announce=lambda _, each: self.announced.append(each),
            limits=Limits(start_poll_seconds=0.0),
        )

    async def settle(self) -> None:
        """Process until nothing is asked for at once."""
        for _ in range(20):
            again = await self.controller.process(KEY)
            if again is None or again > 0.5:
                return
        pytest.fail("never settles")

    @property
    def status(self) -> dict[str, Any]:
        assert self.cluster.job_raw is not None
        return dict(self.cluster.job_raw["status"])


ALL = {
    ("Service", "tiny-ray"),
    ("ConfigMap", "tiny-boot-1"),
    ("Pod", "tiny-head-0"),
    ("Pod", "tiny-worker-0"),
    ("Pod", "tiny-worker-1"),
}


@pytest.fixture
def world() -> World:
    return World()


async def test_everything_is_created_once_with_few_writes(world: World) -> None:
    await world.settle()
    assert world.cluster.objects.keys() == ALL
    assert world.status["head"]["podName"] == "tiny-head-0"
    assert world.cluster.writes.count("status") == 2
    await world.settle()
    assert len(world.cluster.writes) == 7, "nothing is written again"


async def test_a_slow_watch_does_not_look_like_missing_pods(world: World) -> None:
    world.cluster.hidden = set(ALL)
    await world.settle()
    assert world.status["head"]["podUID"] == "uid-tiny-head-0"
    assert len(world.cluster.writes) == 7


async def test_a_slow_watch_of_the_job_does_not_cause_conflicts(world: World) -> None:
    world.cluster.old_job = copy.deepcopy(world.cluster.job_raw)
    await world.settle()
    world.cluster.run()
    await world.settle()
    assert world.status["phase"] == "Running"


async def test_a_conflict_on_the_status_is_tried_again(world: World) -> None:
    world.cluster.faults["write_status"] = [KubeError("conflict", code=409), KubeError("conflict", code=409)]
    await world.settle()
    assert world.cluster.objects.keys() == ALL and "head" in world.status


async def test_nothing_is_created_for_a_job_that_was_deleted_meanwhile(world: World) -> None:
    world.cluster.faults["write_status"] = [KubeError("not found", code=404)]
    assert await world.controller.process(KEY) is not None
    assert not world.cluster.objects and not world.announced


@pytest.mark.parametrize("place", range(8))
async def test_a_failure_at_any_write_and_a_restart_reach_the_same_end(world: World, place: int) -> None:
    """The operator dies at the n-th write, whichever it is, and another one goes on."""
    count = -1

    def failing(method: str) -> None:
        nonlocal count
        count += 1
        if count == place:
            raise KubeError("the API server went away", code=500)

    world.cluster._maybe_fail = failing  # type: ignore[method-assign]
    for _ in range(2):
        try:
            await world.settle()
            world.cluster.run()
            await world.settle()
        except KubeError:
            world.restart()
    await world.settle()
    assert world.cluster.objects.keys() == ALL
    assert world.status["phase"] == "Running"
    assert {each.split("/")[0] for each in world.cluster.writes} == {"status", "Service", "ConfigMap", "Pod"}
    assert len([each for each in world.cluster.writes if each != "status"]) == 5, "nothing was created twice"


async def test_a_missing_pod_is_asked_for_before_it_is_called_lost(world: World) -> None:
    await world.settle()
    world.cluster.run()
    await world.settle()
    world.restart()
    world.cluster.hidden = {("Pod", "tiny-worker-1")}
    await world.settle()
    assert world.status["phase"] == "Running"
    del world.cluster.objects["Pod", "tiny-worker-1"]
    await world.settle()
    assert world.status["lastFailure"]["reason"] == "WorkerLost"
    assert {key for key in world.cluster.objects if key[0] == "Pod"} == set()


async def test_a_service_that_was_deleted_is_made_again_under_a_running_job(world: World) -> None:
    await world.settle()
    world.cluster.run()
    await world.settle()
    world.restart()
    del world.cluster.objects["Service", "tiny-ray"]
    await world.settle()
    assert ("Service", "tiny-ray") in world.cluster.objects and world.status["phase"] == "Running"


async def test_the_end_is_stored_once_and_the_gpus_are_freed(world: World) -> None:
    await world.settle()
    world.cluster.run()
    await world.settle()
    world.cluster.run(terminated={"exitCode": 0, "reason": "Completed"})
    await world.settle()
    assert world.status["phase"] == "Complete"
    assert [key for key in world.cluster.objects if key[0] == "Pod"] == [("Pod", "tiny-head-0")]
    reasons = [each.reason for each in world.announced]
    assert reasons.count("JobCompleted") == 1 and reasons.count("JobRunning") == 1
    writes = len(world.cluster.writes)
    await world.settle()
    world.restart()
    await world.settle()
    assert len(world.cluster.writes) == writes


async def test_a_deletion_that_fails_is_tried_again_before_the_end_is_told(world: World) -> None:
    await world.settle()
    world.cluster.run()
    await world.settle()
    world.cluster.run(terminated={"exitCode": 1, "reason": "Error"})
    world.cluster.faults["delete_pod"] = [KubeError("no", code=500)]
    with pytest.raises(KubeError):
        await world.controller.process(KEY)
    assert world.status["phase"] == "Running"
    await world.settle()
    assert world.status["phase"] == "Failed"


async def test_what_another_owns_is_left_alone_and_waited_for(world: World) -> None:
    theirs = {"kind": "Service", "metadata": {"name": "tiny-ray", "namespace": "ns"}}
    world.cluster.objects["Service", "tiny-ray"] = theirs
    world.cluster.hidden = {("Service", "tiny-ray")}
    assert await world.controller.process(KEY) == Limits().retry_seconds
    assert not [key for key in world.cluster.objects if key[0] == "Pod"]
    del world.cluster.objects["Service", "tiny-ray"]
    world.cluster.hidden = set()
    await world.settle()
    assert world.cluster.objects.keys() == ALL


async def test_a_job_that_is_gone_is_forgotten(world: World) -> None:
    await world.settle()
    world.cluster.job_raw = None
    assert await world.controller.process(KEY) is None
