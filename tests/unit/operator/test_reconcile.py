"""The decisions about a job, from creation to its end, one situation at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.operator.builders import (
    LIMITS,
    NOW,
    all_running,
    created,
    decide,
    ended,
    head,
    job,
    later,
    progress,
    running,
    running_job,
    stored,
    worker,
)

from foremoe_operator.api.constants import ConditionType, EventReason, ExitCode, Phase, Reason, Stage
from foremoe_operator.api.progress import Balance, CheckpointProgress, Problem, Progress
from foremoe_operator.api.status import ForeMoEJobStatus
from foremoe_operator.core.model import Announce, Container, Decision, DeletePod, Observed, Pod, Refusal
from foremoe_operator.core.reconcile import reconcile


def deleted(decision: Decision) -> set[str]:
    return {each.name for each in decision.actions if isinstance(each, DeletePod)}


def announced(decision: Decision) -> list[EventReason]:
    return [each.reason for each in decision.actions if isinstance(each, Announce)]


def reason_of(decision: Decision, kind: ConditionType) -> tuple[str, Reason]:
    assert decision.status is not None
    condition = decision.status.condition(kind)
    assert condition is not None
    return condition.status, condition.reason


def message_of(decision: Decision, kind: ConditionType) -> str:
    assert decision.status is not None
    condition = decision.status.condition(kind)
    assert condition is not None
    return condition.message


def failure_of(decision: Decision) -> tuple[Reason, str]:
    assert decision.status is not None and decision.status.last_failure is not None
    assert decision.status.phase is Phase.FAILED
    return decision.status.last_failure.reason, decision.status.last_failure.message


class TestCreation:
    def test_a_new_job_gets_everything_in_an_order_in_which_it_can_start(self) -> None:
        decision = reconcile(job(), Observed(), NOW, LIMITS)
        assert created(decision) == [
            "Service/tiny-ray",
            "ConfigMap/tiny-boot-1",
            "Pod/tiny-head-0",
            "Pod/tiny-worker-0",
            "Pod/tiny-worker-1",
        ]
        assert decision.status is not None
        assert decision.status.phase is Phase.PENDING
        assert decision.status.start_time == NOW
        assert reason_of(decision, ConditionType.VALIDATED) == ("True", Reason.VALID)

    def test_only_what_is_missing_is_created(self) -> None:
        assert created(decide(job(), head(), worker(1))) == ["Pod/tiny-worker-0"]

    def test_the_head_is_remembered_once_all_pods_exist(self) -> None:
        decision = decide(job(), head(), worker(0), worker(1))
        assert decision.status is not None and decision.status.head is not None
        assert (decision.status.head.pod_name, decision.status.head.pod_uid) == ("tiny-head-0", "head")
        assert reason_of(decision, ConditionType.PODS_SCHEDULED) == ("False", Reason.SCHEDULING)

    def test_pods_of_an_earlier_job_of_this_name_are_waited_for(self) -> None:
        old = head(uid="old", owner_uid="another")
        decision = decide(job(), old)
        assert "Pod/tiny-head-0" not in created(decision)
        assert deleted(decision) == set()
        assert decision.requeue_seconds == LIMITS.retry_seconds
        assert "earlier job" in message_of(decision, ConditionType.PODS_SCHEDULED)

    def test_a_quota_refusal_is_shown_and_retried(self) -> None:
        refusal = Refusal(kind="Pod", name="tiny-worker-1", code=403, message="exceeded quota: gpus", final=False)
        decision = decide(job(), head(), worker(0), refusals=(refusal,))
        assert created(decision) == ["Pod/tiny-worker-1"]
        assert decision.requeue_seconds == LIMITS.retry_seconds
        assert reason_of(decision, ConditionType.PODS_SCHEDULED) == ("False", Reason.CREATE_FAILED)
        assert reason_of(decision, ConditionType.VALIDATED) == ("False", Reason.POD_REJECTED)
        assert "exceeded quota" in message_of(decision, ConditionType.VALIDATED)

    def test_a_pod_the_api_server_calls_invalid_ends_the_job_and_frees_the_others(self) -> None:
        refusal = Refusal(kind="Pod", name="tiny-worker-1", code=422, message="spec.x: Invalid", final=True)
        decision = decide(job(), head(), worker(0), refusals=(refusal,))
        assert failure_of(decision)[0] is Reason.POD_REJECTED
        assert deleted(decision) == {"tiny-head-0", "tiny-worker-0"}

    def test_a_spec_that_cannot_be_read_fails_the_job_with_the_field(self) -> None:
        broken = replace(job(), spec=None, problems=("spec.image: Field required",))
        decision = reconcile(broken, Observed(), NOW, LIMITS)
        assert failure_of(decision) == (Reason.INVALID_SPEC, "spec.image: Field required")
        assert created(decision) == []

    def test_a_job_that_is_being_deleted_is_left_alone(self) -> None:
        assert reconcile(replace(job(), deleting=True), Observed(), NOW, LIMITS) == Decision()


class TestWaiting:
    def test_unschedulable_pods_are_named_with_the_schedulers_words(self) -> None:
        stuck = worker(1, unschedulable="0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
        decision = decide(job(), running(head()), running(worker(0)), stuck)
        assert reason_of(decision, ConditionType.PODS_SCHEDULED) == ("False", Reason.UNSCHEDULABLE)
        assert "tiny-worker-1: 0/2 nodes" in message_of(decision, ConditionType.PODS_SCHEDULED)

    @pytest.mark.parametrize("why", ["ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"])
    def test_an_image_that_cannot_be_pulled_is_shown_at_once(self, why: str) -> None:
        waiting = Container(reason=why, message='image "x" not found')
        pods = [replace(pod, node="node1", container=waiting) for pod in (head(), worker(0), worker(1))]
        decision = decide(job(), *pods)
        assert reason_of(decision, ConditionType.READY) == ("False", Reason.IMAGE_PULL_BACK_OFF)
        message = message_of(decision, ConditionType.READY)
        assert message.startswith('pod tiny-head-0 and 2 more: image "x" not found') and "spec.image" in message

    def test_a_container_that_cannot_be_made_is_shown(self) -> None:
        waiting = Container(reason="CreateContainerConfigError", message="image has non-numeric user")
        decision = decide(job(), replace(head(), node="n", container=waiting), running(worker(0)), running(worker(1)))
        assert reason_of(decision, ConditionType.READY) == ("False", Reason.CONTAINER_CONFIG_ERROR)

    def test_a_missing_claim_is_shown_with_what_to_check(self) -> None:
        said = 'persistentvolumeclaim "shared" not found'
        pods = [replace(pod, unschedulable=said) for pod in (head(), worker(0), worker(1))]
        decision = decide(job(), *pods)
        assert reason_of(decision, ConditionType.READY) == ("False", Reason.VOLUME_NOT_READY)
        assert "kubectl get pvc" in message_of(decision, ConditionType.READY)

    def test_a_volume_that_does_not_mount_is_shown_after_a_while(self) -> None:
        stuck = replace(head(), node="node1", container=Container(reason="ContainerCreating"))
        pods = (stuck, running(worker(0)), running(worker(1)))
        early = decide(job(), *pods)
        assert reason_of(early, ConditionType.READY) == ("False", Reason.WAITING_FOR_HEAD)
        assert early.requeue_seconds is not None and early.requeue_seconds <= LIMITS.volume_seconds
        late = decide(job(), *pods, now=later(LIMITS.volume_seconds))
        assert reason_of(late, ConditionType.READY) == ("False", Reason.VOLUME_NOT_READY)

    def test_workers_that_have_not_joined_are_counted(self) -> None:
        pods = (running(head()), running(worker(0)), running(worker(1), ready=False))
        report = Progress(stage=Stage.WAITING_FOR_WORKERS, workers_joined=1)
        decision = decide(job(), *pods, progress=report, head_answered=True)
        assert reason_of(decision, ConditionType.READY) == ("False", Reason.WAITING_FOR_WORKERS)
        assert "1 of 2 workers" in message_of(decision, ConditionType.READY)
        assert "tiny-worker-1" in message_of(decision, ConditionType.READY)
        assert decision.status is not None and decision.status.phase is Phase.STARTING

    def test_start_up_has_a_deadline_which_names_what_was_waited_for(self) -> None:
        stuck = worker(1, unschedulable="0/2 nodes are available")
        first = decide(job(startupDeadlineSeconds=60), running(head()), running(worker(0)), stuck)
        assert first.requeue_seconds is not None and first.requeue_seconds <= 61
        subject = stored(job(startupDeadlineSeconds=60), first)
        decision = decide(subject, running(head()), running(worker(0)), stuck, now=later(60))
        reason, message = failure_of(decision)
        assert reason is Reason.STARTUP_DEADLINE_EXCEEDED and "0/2 nodes are available" in message
        assert deleted(decision) == {"tiny-head-0", "tiny-worker-0", "tiny-worker-1"}


class TestRunning:
    def test_joined_ranks_make_a_job_run(self) -> None:
        subject = job()
        decision = decide(subject, *all_running(), progress=progress(step=1), head_answered=True)
        assert decision.status is not None and decision.status.phase is Phase.RUNNING
        assert announced(decision) == [EventReason.JOB_RUNNING]
        assert decision.requeue_seconds == LIMITS.poll_seconds
        again = decide(stored(subject, decision), *all_running(), progress=progress(step=1), head_answered=True)
        assert again.status == stored(subject, decision).status and again.actions == ()

    def test_the_startup_deadline_ends_with_the_start(self) -> None:
        decision = decide(running_job(startupDeadlineSeconds=60), *all_running(), now=later(3600))
        assert decision.status is not None and decision.status.phase is Phase.RUNNING

    def test_the_active_deadline_frees_everything(self) -> None:
        decision = decide(running_job(activeDeadlineSeconds=600), *all_running(), now=later(600))
        assert failure_of(decision)[0] is Reason.ACTIVE_DEADLINE_EXCEEDED
        assert deleted(decision) == {"tiny-head-0", "tiny-worker-0", "tiny-worker-1"}

    def test_progress_is_copied_with_numbers_as_strings(self) -> None:
        report = progress(
            step=2,
            reward=0.51234567,
            step_seconds=7.25,
            balance=Balance(mean=1.25, max=2.5),
            checkpoint=CheckpointProgress(step=2, path="/data/checkpoints/global_step_2", time=NOW),
        )
        status = decide(running_job(), *all_running(), progress=report, head_answered=True).status
        assert status is not None and status.progress is not None
        assert status.progress.dump() == {
            "stage": "Rollout",
            "step": 2,
            "totalSteps": 3,
            "reward": "0.5123",
            "stepSeconds": "7.25",
            "balance": {"mean": "1.25", "max": "2.5"},
        }
        assert status.checkpoint is not None
        assert (status.checkpoint.latest_step, status.checkpoint.path) == (2, "/data/checkpoints/global_step_2")

    def test_a_report_takes_nothing_back(self) -> None:
        subject = running_job()
        ahead = decide(subject, *all_running(), progress=progress(step=2, reward=0.5), head_answered=True)
        subject = stored(subject, ahead)
        behind = decide(subject, *all_running(), progress=progress(Stage.BOOTING, step=0), head_answered=True)
        nan = decide(subject, *all_running(), progress=progress(step=2, reward=float("nan")), head_answered=True)
        for decision in (behind, nan):
            assert decision.status is not None and decision.status.progress is not None
            assert (decision.status.progress.step, decision.status.progress.reward) == (2, "0.5")

    def test_a_silent_head_is_reported_and_forgiven_while_the_kubelet_still_reaches_it(self) -> None:
        subject = running_job()
        late = decide(subject, *all_running(), head_answered=False)
        assert late.status is not None and late.status.phase is Phase.RUNNING, "one late answer is no news"
        subject = stored(subject, late)
        assert subject.status.status_check_failure_start_time == NOW
        soon = later(LIMITS.silence_notice_seconds)
        silent = decide(subject, *all_running(), head_answered=False, now=soon)
        assert reason_of(silent, ConditionType.READY) == ("False", Reason.HEAD_UNREACHABLE)
        still = decide(subject, *all_running(), head_answered=False, now=later(3600))
        assert still.status is not None and still.status.phase is Phase.STARTING
        back = decide(subject, *all_running(), progress=progress(), head_answered=True)
        assert back.status is not None and back.status.status_check_failure_start_time is None
        assert reason_of(back, ConditionType.READY) == ("True", Reason.ALL_RANKS_JOINED)

    def test_a_head_that_nobody_reaches_is_given_up(self) -> None:
        subject = running_job()
        subject = stored(subject, decide(subject, *all_running(), head_answered=False))
        pods = (running(head(), ready=False), running(worker(0)), running(worker(1)))
        decision = decide(subject, *pods, head_answered=False, now=later(LIMITS.head_silence_seconds))
        assert failure_of(decision)[0] is Reason.HEAD_LOST


class TestEnd:
    def test_exit_code_0_of_the_head_completes_the_job_and_frees_the_workers(self) -> None:
        report = progress(Stage.FINISHED, step=3, exit_code=0).model_dump_json(by_alias=True)
        decision = decide(running_job(), ended(head(), 0, message=report), running(worker(0)), running(worker(1)))
        assert decision.status is not None and decision.status.phase is Phase.COMPLETE
        assert reason_of(decision, ConditionType.COMPLETE) == ("True", Reason.SUCCEEDED)
        assert reason_of(decision, ConditionType.READY) == ("False", Reason.FINISHED)
        assert decision.status.progress is not None and decision.status.progress.step == 3
        assert decision.status.completion_time == NOW
        assert (decision.status.workers.scheduled, decision.status.workers.ready) == (2, 0)
        assert deleted(decision) == {"tiny-worker-0", "tiny-worker-1"}, "the ended head stays for its log"
        assert announced(decision) == [EventReason.JOB_COMPLETED]

    def test_a_head_of_another_uid_completes_nothing(self) -> None:
        decision = decide(
            running_job(), ended(head(uid="imposter"), 0), running(worker(0)), running(worker(1)), live=True
        )
        assert failure_of(decision)[0] is Reason.HEAD_LOST

    def test_an_ended_job_only_ever_frees_pods(self) -> None:
        subject = running_job()
        subject = stored(subject, decide(subject, ended(head(), 0), running(worker(0)), running(worker(1))))
        decision = decide(subject, ended(head(), 0), running(worker(0)), now=later(60))
        assert deleted(decision) == {"tiny-worker-0"} and decision.status == subject.status
        assert decide(subject, now=later(120)).actions == ()

    def test_the_drivers_error_is_shown_with_its_exit_code_and_log(self) -> None:
        report = progress(step=1, exit_code=3, log_tail="ValueError: no").model_dump_json(by_alias=True)
        decision = decide(running_job(), ended(head(), 3, message=report), running(worker(0)), running(worker(1)))
        assert failure_of(decision) == (Reason.DRIVER_ERROR, "the driver ended with exit code 3")
        assert decision.status is not None and decision.status.workers.ready == 0
        assert decision.status is not None and decision.status.last_failure is not None
        assert decision.status.last_failure.exit_code == 3
        assert decision.status.last_failure.log_tail == "ValueError: no"
        assert decision.status.last_failure.node_name == "node1"
        assert deleted(decision) == {"tiny-worker-0", "tiny-worker-1"}
        assert announced(decision) == [EventReason.JOB_FAILED]

    def test_an_agent_that_did_not_even_start_is_told_apart(self) -> None:
        message = "ModuleNotFoundError: No module named 'foremoe'"
        decision = decide(job(), ended(head(), 1, message=message), running(worker(0)), running(worker(1)))
        assert failure_of(decision)[0] is Reason.BOOT_FAILED
        assert decision.status is not None and decision.status.last_failure is not None
        assert decision.status.last_failure.log_tail == message

    def test_a_problem_the_agent_knows_is_the_reason(self) -> None:
        problem = Problem(reason=Reason.MODEL_NOT_FOUND, message="model.path /data/model does not exist")
        report = Progress(problem=problem).model_dump_json(by_alias=True)
        pods = (ended(head(), ExitCode.CONFIG, message=report), running(worker(0)), running(worker(1)))
        reason, message = failure_of(decide(job(), *pods))
        assert reason is Reason.MODEL_NOT_FOUND and "/data/model" in message

    def test_a_worker_killed_for_memory_explains_the_heads_error(self) -> None:
        report = progress(exit_code=1, log_tail="ActorDiedError").model_dump_json(by_alias=True)
        pods = (ended(head(), 1, message=report), running(worker(0)), ended(worker(1), 137, reason="OOMKilled"))
        decision = decide(running_job(), *pods)
        reason, message = failure_of(decision)
        assert reason is Reason.OOM_KILLED and "tiny-worker-1" in message and "memory" in message

    def test_an_evicted_worker_explains_the_heads_error(self) -> None:
        evicted = ended(worker(0), 137, reason="Error")
        evicted = replace(evicted, reason="Evicted", message="The node was low on resource: memory.")
        decision = decide(running_job(), ended(head(), 1), evicted, running(worker(1)))
        assert failure_of(decision)[0] is Reason.EVICTED

    def test_a_worker_that_ended_because_the_head_did_explains_nothing(self) -> None:
        report = progress(exit_code=1).model_dump_json(by_alias=True)
        problem = Problem(reason=Reason.HEAD_LOST, message="the head is gone")
        peer = Progress(problem=problem).model_dump_json(by_alias=True)
        pods = (ended(head(), 1, message=report), ended(worker(0), 69, message=peer), running(worker(1)))
        assert failure_of(decide(running_job(), *pods))[0] is Reason.DRIVER_ERROR

    def test_a_failed_worker_is_given_time_for_the_head_to_say_more(self) -> None:
        pods = (running(head()), ended(worker(0), 1, message="Traceback"), running(worker(1)))
        soon = decide(running_job(), *pods, now=later(1))
        assert soon.status is not None and soon.status.phase is Phase.RUNNING and soon.status.workers.failed == 1
        assert soon.requeue_seconds is not None and soon.requeue_seconds <= LIMITS.worker_grace_seconds
        decision = decide(running_job(), *pods, now=later(LIMITS.worker_grace_seconds))
        reason, message = failure_of(decision)
        assert reason is Reason.WORKER_LOST and "tiny-worker-0 ended with exit code 1" in message
        assert deleted(decision) == {"tiny-head-0", "tiny-worker-0", "tiny-worker-1"}

    def test_a_head_that_lost_a_worker_lets_the_worker_explain(self) -> None:
        problem = Problem(reason=Reason.WORKER_LOST, message="worker 0 left")
        report = Progress(problem=problem).model_dump_json(by_alias=True)
        pods = (
            ended(head(), 69, message=report),
            ended(worker(0), 1, message="CUDA error: Xid 79"),
            running(worker(1)),
        )
        decision = decide(running_job(), *pods)
        assert failure_of(decision)[0] is Reason.WORKER_LOST
        assert decision.status is not None and decision.status.last_failure is not None
        assert decision.status.last_failure.log_tail == "CUDA error: Xid 79"

    @pytest.mark.parametrize("pods", [(), (running(worker(0)), running(worker(1)))])
    def test_a_missing_head_is_looked_for_before_it_is_called_lost(self, pods: tuple[Pod, ...]) -> None:
        assert decide(running_job(), *pods).confirm
        assert failure_of(decide(running_job(), *pods, live=True))[0] is Reason.HEAD_LOST

    def test_a_missing_worker_is_never_made_again(self) -> None:
        assert decide(running_job(), running(head()), running(worker(0))).confirm
        decision = decide(running_job(), running(head()), running(worker(0)), live=True)
        assert failure_of(decision)[0] is Reason.WORKER_LOST and created(decision) == []

    def test_a_drained_head_ends_the_job(self) -> None:
        pods = (running(head(), deleting=NOW), running(worker(0)), running(worker(1)))
        decision = decide(running_job(), *pods)
        assert failure_of(decision)[0] is Reason.HEAD_LOST
        assert deleted(decision) == {"tiny-worker-0", "tiny-worker-1"}

    @pytest.mark.parametrize(
        ("code", "reason"), [(137, Reason.HEAD_LOST), (143, Reason.HEAD_LOST), (1, Reason.BOOT_FAILED)]
    )
    def test_a_head_that_ended_by_its_deletion_is_lost_too(self, code: int, reason: Reason) -> None:
        gone = ended(head(), code, deleting=NOW)
        assert failure_of(decide(running_job(), gone, running(worker(0)), running(worker(1))))[0] is reason

    def test_a_head_refused_by_its_node_is_lost_with_the_kubelets_words(self) -> None:
        refused = replace(head(), phase="Failed", reason="OutOfcpu", message="Node didn't have enough resource: cpu")
        reason, message = failure_of(decide(job(), refused, worker(0), worker(1)))
        assert reason is Reason.HEAD_LOST and "enough resource: cpu" in message


def test_unknown_fields_of_a_status_are_dropped() -> None:
    odd = ForeMoEJobStatus.model_validate({"phase": "Running", "somethingNew": 1})
    assert decide(job(status=odd), *all_running()).status is not None
