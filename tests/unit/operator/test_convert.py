"""Objects as API servers send them, odd ones included."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.builders import UID, decide, job, manifest

from foremoe_operator.api.constants import Role
from foremoe_operator.core.model import Decision
from foremoe_operator.kube.convert import job_from, key_of_child, pod_from

RAW_POD: dict[str, Any] = {
    "metadata": {
        "name": "tiny-worker-1",
        "namespace": "ns",
        "uid": "u",
        "creationTimestamp": "2026-07-01T12:00:00Z",
        "labels": {"foremoe.io/job": "tiny", "foremoe.io/role": "worker", "foremoe.io/worker-index": "1"},
        "ownerReferences": [{"uid": "no", "kind": "X"}, {"uid": UID, "controller": True}],
    },
    "spec": {"nodeName": "node2"},
    "status": {
        "phase": "Failed",
        "podIP": "10.1.2.3",
        "conditions": [{"type": "Ready", "status": "False"}, {"type": "PodReadyToStartContainers", "status": "True"}],
        "containerStatuses": [
            {
                "state": {
                    "terminated": {
                        "exitCode": 137,
                        "reason": "OOMKilled",
                        "message": "log",
                        "finishedAt": "2026-07-01T12:00:30Z",
                    }
                }
            }
        ],
    },
}


def test_a_pod_that_was_killed() -> None:
    pod = pod_from(RAW_POD)
    assert (pod.name, pod.role, pod.index, pod.node, pod.owner_uid) == ("tiny-worker-1", Role.WORKER, 1, "node2", UID)
    assert (pod.container.exit_code, pod.container.reason, pod.container.message) == (137, "OOMKilled", "log")
    assert pod.ended and not pod.ready and pod.container.started
    assert key_of_child(RAW_POD) == ("ns", "tiny")


def test_a_pod_that_waits() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    pod = pod_from({"metadata": {"name": "x"}, "status": {"conditions": [condition]}})
    assert pod.unschedulable == "0/2 nodes" and not pod.ended and pod.node is None
    gated = pod_from({"status": {"conditions": [{**condition, "reason": "SchedulingGated"}]}})
    assert gated.unschedulable == ""


def test_a_job_survives_the_way_to_the_api_server_and_back() -> None:
    raw = {**manifest(), "metadata": {"name": "tiny", "namespace": "ns", "uid": UID, "generation": 1}}
    stored = job_from(raw)
    assert stored.job.spec == job().spec and not stored.job.deleting
    decision = decide(stored.job)
    assert decision.status is not None
    again = job_from({**raw, "status": decision.status.dump()})
    assert again.job.status == decision.status


def test_a_spec_that_does_not_parse_becomes_a_problem_with_the_field() -> None:
    stored = job_from({"metadata": {"name": "x"}, "spec": {**manifest()["spec"], "totalSteps": 0, "workers": {}}})
    assert stored.job.spec is None
    assert [each.split(":")[0] for each in stored.job.problems] == ["spec.totalSteps", "spec.workers.replicas"]


def test_a_job_whose_status_a_newer_operator_wrote_is_left_alone() -> None:
    newer = {
        "type": "Failed",
        "status": "True",
        "reason": "ReasonOfTomorrow",
        "lastTransitionTime": "2026-07-01T12:00:00Z",
    }
    stored = job_from({**manifest(), "status": {"phase": "Failed", "conditions": [newer]}})
    assert not stored.job.readable
    assert decide(stored.job) == Decision(), "above all: an ended job does not get its pods again"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "status", "labels", "conditions", "state", "containerStatuses", "type"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), json_values))
def test_nothing_an_api_server_could_send_raises(raw: dict[str, Any]) -> None:
    pod_from(raw)
    job_from(raw)
    key_of_child(raw)
