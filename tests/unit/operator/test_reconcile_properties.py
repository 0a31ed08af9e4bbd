"""What holds for every observation, however odd: hypothesis makes them up."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.builders import CHILDREN, LIMITS, UID, created, head, job, later, stored, worker

from foremoe_operator.api.constants import ConditionType, Phase, Reason, Role, Stage
from foremoe_operator.api.progress import Balance, Problem, Progress
from foremoe_operator.api.status import ForeMoEJobStatus
from foremoe_operator.core.conditions import phase_of
from foremoe_operator.core.model import Container, Create, DeletePod, Job, Observed, Pod, Refusal
from foremoe_operator.core.reconcile import reconcile

times = st.integers(-10, 5000).map(later)
floats = st.none() | st.floats()
text = st.text(max_size=80)
reports = st.builds(
    Progress,
    stage=st.sampled_from(Stage),
    workers_joined=st.integers(0, 3),
    step=st.integers(0, 5),
    total_steps=st.integers(0, 5),
    reward=floats,
    step_seconds=floats,
    balance=st.none() | st.builds(Balance, mean=st.floats(), max=st.floats()),
    started_time=st.none() | times,
    exit_code=st.none() | st.integers(-1, 255),
    problem=st.none() | st.builds(Problem, reason=st.sampled_from(Reason), message=text),
    log_tail=text,
)
container_reasons = st.sampled_from(
    ["", "ContainerCreating", "ErrImagePull", "CreateContainerConfigError", "Error", "Completed", "OOMKilled",
     "StartError", "ContainerStatusUnknown"]
)  # fmt: skip
messages = text | reports.map(lambda report: report.model_dump_json(by_alias=True))
containers = st.builds(
    Container,
    started=st.booleans(),
    reason=container_reasons,
    message=messages,
    exit_code=st.none() | st.sampled_from([0, 1, 69, 78, 137, 143, 255]),
    finished=st.none() | times,
)


def _variants(pod: Pod) -> st.SearchStrategy[Pod]:
    return st.builds(
        lambda **fields: replace(pod, **fields),
        uid=st.sampled_from([pod.uid, "other"]),
        owner_uid=st.sampled_from([UID, UID, UID, "another"]),
        phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
        node=st.none() | st.just("node1"),
        ip=st.none() | st.just("10.0.0.1"),
        ready=st.booleans(),
        unschedulable=st.sampled_from(["", 'persistentvolumeclaim "x" not found', "0/2 nodes are available"]),
        sandbox_ready=st.booleans(),
        reason=st.sampled_from(["", "Evicted", "NodeLost", "OutOfcpu"]),
        container=containers,
        deleting=st.none() | times,
    )


def _subsets(pods: list[Pod]) -> st.SearchStrategy[tuple[Pod, ...]]:
    return st.tuples(*(st.none() | _variants(pod) for pod in pods)).map(
        lambda found: tuple(pod for pod in found if pod is not None)
    )


observations = st.builds(
    Observed,
    pods=_subsets([head(), worker(0), worker(1), worker(7)]),
    children=st.sampled_from([frozenset(), CHILDREN]),
    progress=st.none() | reports,
    head_answered=st.none() | st.booleans(),
    refusals=st.just(())
    | st.just((Refusal(kind="Pod", name="tiny-worker-1", code=403, message="quota", final=False),))
    | st.just((Refusal(kind="Pod", name="tiny-worker-1", code=422, message="invalid", final=True),)),
    live=st.booleans(),
)
histories = st.lists(st.tuples(observations, st.integers(0, 2000)), min_size=1, max_size=5)


def _run(history: list[tuple[Observed, int]]) -> tuple[Job, Observed, datetime]:
    """Live through all observations but decide about the last one only."""
    subject, seconds = job(), 0
    for observed, passed in history[:-1]:
        seconds += passed
        decision = reconcile(subject, observed, later(seconds), LIMITS)
        if decision.status is not None:
            subject = stored(subject, decision)
    observed, passed = history[-1]
    return subject, observed, later(seconds + passed)


@given(histories)
@settings(max_examples=100)
def test_the_status_is_always_one_the_api_server_takes_and_its_phase_agrees_with_its_conditions(
    history: list[tuple[Observed, int]],
) -> None:
    subject, observed, now = _run(history)
    status = reconcile(subject, observed, now, LIMITS).status
    if status is None:
        return
    assert ForeMoEJobStatus.model_validate(status.dump()) == status
    assert status.phase is phase_of(status.conditions)
    assert [each.type for each in status.conditions] == [k for k in ConditionType if status.condition(k) is not None]
    assert not (status.is_true(ConditionType.COMPLETE) and status.is_true(ConditionType.FAILED))
    assert (status.completion_time is None) == (status.phase not in (Phase.COMPLETE, Phase.FAILED))


@given(histories)
@settings(max_examples=100)
def test_deciding_again_with_the_status_stored_changes_nothing(history: list[tuple[Observed, int]]) -> None:
    subject, observed, now = _run(history)
    first = reconcile(subject, observed, now, LIMITS)
    if first.status is None:
        return
    second = reconcile(stored(subject, first), observed, now, LIMITS)
    assert second.status == first.status
    assert {each for each in second.actions if isinstance(each, DeletePod)} == {
        each for each in first.actions if isinstance(each, DeletePod)
    }
    assert created(second) == created(first)


@given(histories)
@settings(max_examples=100)
def test_an_ended_job_keeps_no_pod_with_a_gpu_and_stays_ended(history: list[tuple[Observed, int]]) -> None:
    subject, observed, now = _run(history)
    decision = reconcile(subject, observed, now, LIMITS)
    was_over = subject.status.phase in (Phase.COMPLETE, Phase.FAILED)
    if decision.status is None or decision.status.phase not in (Phase.COMPLETE, Phase.FAILED):
        assert not was_over
        return
    ours = {pod.uid for pod in observed.pods if pod.owner_uid == UID and pod.role is Role.WORKER and not pod.deleting}
    known = {pod.uid for pod in observed.pods if pod.name in ("tiny-worker-0", "tiny-worker-1")}
    deleted = {each.uid for each in decision.actions if isinstance(each, DeletePod)}
    assert ours & known <= deleted
    assert not any(isinstance(each, Create) for each in decision.actions)
    if was_over:
        assert decision.status == subject.status


@given(histories)
@settings(max_examples=100)
def test_pods_of_others_are_never_touched_and_complete_needs_the_heads_own_exit_code(
    history: list[tuple[Observed, int]],
) -> None:
    subject, observed, now = _run(history)
    decision = reconcile(subject, observed, now, LIMITS)
    foreign = {pod.uid for pod in observed.pods if pod.owner_uid != UID} - {
        pod.uid for pod in observed.pods if pod.owner_uid == UID
    }
    assert not foreign & {each.uid for each in decision.actions if isinstance(each, DeletePod)}
    completed = decision.status is not None and decision.status.phase is Phase.COMPLETE
    if completed and subject.status.phase is not Phase.COMPLETE:
        assert decision.status is not None and decision.status.head is not None
        heads = [pod for pod in observed.pods if pod.uid == decision.status.head.pod_uid and pod.role is Role.HEAD]
        assert [pod.container.exit_code for pod in heads] == [0]
