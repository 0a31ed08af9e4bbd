"""Jobs with real pods: created, followed to every kind of end, and gone without a trace."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import httpx
import pytest

from tests.cluster.conftest import WORKER_IMAGE, Namespace, Operator, Trial, wait_for

pytestmark = pytest.mark.cluster

ALL = ["configmaps/boot-1", "pods/head-0", "pods/worker-0", "pods/worker-1", "services/ray"]


def metrics_of(operator: Operator) -> str:
    return httpx.get(f"http://127.0.0.1:{operator.metrics_port}/metrics").text


class TestLife:
    def test_a_job_runs_completes_and_leaves_only_its_log(self, operator: Operator, trial: Trial) -> None:
        trial.start()
        assert trial.children() == ALL
        metadata = trial.job["metadata"]
        assert "finalizers" not in metadata, "nothing of ours may hold up a deletion"
        assert [key for key in metadata.get("annotations", {}) if "kubectl" not in key] == []
        assert len({pod["spec"]["nodeName"] for role, pod in trial.pods().items() if role != "head-0"}) == 2
        wait_for("ready workers", lambda: trial.status["workers"]["ready"] == 2)
        status = trial.status
        assert status["workers"] == {"desired": 2, "scheduled": 2, "ready": 2, "failed": 0}
        assert status["progress"]["step"] == 1 and status["progress"]["reward"] == "0.25"
        assert status["progress"]["balance"] == {"mean": "1.25", "max": "2"}
        assert status["checkpoint"]["path"] == "/data/checkpoints/global_step_1"
        row = trial.kubectl("get", "fmj", trial.name)
        assert all(word in row for word in ("PHASE", "STEP", "REWARD", "BALANCE", "Running", "0.25", "1.25"))
        labels = f'job="{trial.name}",namespace="{trial.namespace.name}"'
        metrics = metrics_of(operator)
        assert f"foremoe_job_step{{{labels}}} 1.0" in metrics
        assert f'foremoe_job_status{{{labels},phase="Running"}} 1.0' in metrics

        trial.order("head-0", "exit 0")
        trial.wait_condition("Complete")
        wait_for("GPUs freed", lambda: not trial.gpus_held())
        assert trial.status["phase"] == "Complete" and trial.status["progress"]["step"] == 3
        assert "fake agent: head" in trial.kubectl("logs", f"{trial.name}-head-0"), "the head's log stays readable"
        expected = {"CreatedHeadPod", "CreatedWorkerPod", "JobRunning", "JobCompleted", "DeletedWorkerPod"}
        wait_for("events", lambda: expected <= trial.events())

        trial.kubectl("delete", "fmj", trial.name, "--timeout=60s")
        wait_for("nothing left", lambda: trial.children() == [])
        wait_for("metrics of the job gone", lambda: labels not in metrics_of(operator))

    @pytest.mark.parametrize("cascade", ["foreground", "background"])
    def test_deleting_a_running_job_leaves_nothing(self, trial: Trial, cascade: str) -> None:
        trial.start()
        trial.kubectl("delete", "fmj", trial.name, f"--cascade={cascade}", "--timeout=60s")
        wait_for("nothing left", lambda: trial.children() == [])

    def test_a_job_may_be_created_again_at_once(self, trial: Trial) -> None:
        trial.start(terminationGracePeriodSeconds=3)
        old = {pod["metadata"]["uid"] for pod in trial.pods().values()}
        trial.kubectl("delete", "fmj", trial.name, "--wait=false")
        wait_for("the job object is gone", lambda: not trial.job)
        trial.start()
        assert not old & {pod["metadata"]["uid"] for pod in trial.pods().values()}
        assert trial.children() == ALL

    @pytest.mark.parametrize("length", [50])
    def test_the_longest_name_works(self, trial: Trial, length: int) -> None:
        longest = replace(trial, name=(trial.name + "-" + "x" * length)[:length])
        longest.start()
        assert longest.children() == ALL
        longest.kubectl("delete", "fmj", longest.name)


class TestFailures:
    def test_an_image_that_does_not_exist_is_named_within_30_seconds(self, trial: Trial) -> None:
        trial.apply(image="localhost/no-such-image:v1")
        wait_for("named", lambda: trial.condition("Ready").get("reason") == "ImagePullBackOff", seconds=30)
        message = trial.condition("Ready")["message"]
        assert f"pod {trial.name}-" in message and "spec.image" in message
        assert trial.phase in ("Pending", "Starting")

    def test_an_image_name_that_is_none_is_named(self, trial: Trial) -> None:
        trial.apply(image="Not/A:Valid:Image")
        wait_for("named", lambda: trial.condition("Ready").get("reason") == "ImagePullBackOff", seconds=30)

    def test_a_driver_that_fails_is_shown_with_exit_code_and_log(self, trial: Trial) -> None:
        trial.apply(env={"HEAD_ORDER": "exit 3"})
        trial.wait_condition("Failed")
        failure = trial.status["lastFailure"]
        assert (failure["reason"], failure["exitCode"]) == ("DriverError", 3)
        assert failure["podName"] == f"{trial.name}-head-0" and failure["nodeName"].startswith("node")
        assert failure["logTail"].endswith("RuntimeError: made to fail")
        wait_for("GPUs freed", lambda: not trial.gpus_held())
        wait_for("event", lambda: "JobFailed" in trial.events())

    def test_an_image_without_an_agent_fails_with_its_last_words(self, trial: Trial) -> None:
        trial.apply(env={"PYTHONPATH": "/data/none"})
        trial.wait_condition("Failed")
        failure = trial.status["lastFailure"]
        assert failure["reason"] == "BootFailed" and "No module named" in failure["logTail"]
        wait_for("GPUs freed", lambda: not trial.gpus_held())

    def test_a_problem_found_by_the_agent_is_the_reason(self, trial: Trial) -> None:
        trial.apply(env={"HEAD_ORDER": "problem ModelNotFound model.path /data/model does not exist"})
        condition = trial.wait_condition("Failed")
        assert condition["reason"] == "ModelNotFound" and "/data/model does not exist" in condition["message"]
        assert trial.status["lastFailure"]["exitCode"] == 78

    def test_a_missing_model_is_said_by_the_real_agent_before_ray_starts(self, trial: Trial) -> None:
        trial.apply(image=WORKER_IMAGE, env={"PYTHONPATH": ""}, model={"path": "/data/no-such-model"})
        condition = trial.wait_condition("Failed")
        assert condition["reason"] == "ModelNotFound" and "/data/no-such-model" in condition["message"]
        assert "ray: " not in trial.kubectl("logs", f"{trial.name}-head-0")
        wait_for("GPUs freed", lambda: not trial.gpus_held())

    def test_a_worker_killed_for_memory_is_found_out(self, trial: Trial) -> None:
        workers = {"replicas": 2, "gpusPerWorker": 1, "resources": {"memory": "64Mi"}}
        trial.apply(workers=workers, env={"WORKER_ORDER": "oom"})
        assert trial.wait_condition("Failed")["reason"] == "OOMKilled"
        wait_for("GPUs freed", lambda: not trial.gpus_held())

    def test_a_missing_claim_is_shown_and_the_deadline_holds(self, operator: Operator, namespace: Namespace) -> None:
        trial = Trial(namespace, "tiny")
        trial.apply(startupDeadlineSeconds=20)
        wait_for("shown", lambda: trial.condition("Ready").get("reason") == "VolumeNotReady", seconds=20)
        assert 'persistentvolumeclaim "shared" not found' in trial.condition("PodsScheduled")["message"]
        assert trial.wait_condition("Failed", seconds=30)["reason"] == "StartupDeadlineExceeded"
        wait_for("pods gone", lambda: not trial.pods())

    def test_more_gpus_than_there_are_is_shown(self, trial: Trial) -> None:
        trial.apply(workers={"replicas": 1, "gpusPerWorker": 64})
        wait_for("shown", lambda: trial.condition("PodsScheduled").get("reason") == "Unschedulable")
        assert "Insufficient nvidia.com/gpu" in trial.condition("PodsScheduled")["message"]

    def test_a_quota_is_shown_and_obeyed_once_it_has_room(self, operator: Operator, namespace: Namespace) -> None:
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "gpus"},
            "spec": {"hard": {"requests.nvidia.com/gpu": "1"}},
        }
        namespace.apply(quota)
        # Until the quota's own controller has seen it, it limits nothing.
        seen = "jsonpath={.status.hard.requests\\.nvidia\\.com/gpu}=1"
        namespace.kubectl("wait", f"--for={seen}", "resourcequota/gpus", "--timeout=60s")
        trial = Trial(namespace, "tiny")
        trial.apply()
        wait_for("shown", lambda: trial.condition("PodsScheduled").get("reason") == "CreateFailed")
        assert "exceeded quota" in trial.condition("PodsScheduled")["message"]
        namespace.kubectl("delete", "resourcequota", "gpus")
        wait_for("all pods there", lambda: len(trial.pods()) == 3)
        wait_for("told", lambda: trial.condition("Validated")["status"] == "True")

    def test_a_service_of_someone_else_is_not_taken(self, operator: Operator, namespace: Namespace) -> None:
        theirs = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "tiny-ray"},
            "spec": {"clusterIP": "None", "selector": {"app": "theirs"}},
        }
        namespace.apply(theirs)
        trial = Trial(namespace, "tiny")
        trial.apply()
        wait_for("shown", lambda: trial.condition("PodsScheduled").get("reason") == "CreateFailed")
        message = trial.condition("PodsScheduled")["message"]
        assert "Service tiny-ray" in message and "does not belong" in message
        assert namespace.read("services", "tiny-ray")["spec"]["selector"] == {"app": "theirs"}
        assert not trial.pods(), "no GPU is held while the job cannot start"

    @pytest.mark.parametrize(("victim", "reason"), [("head-0", "HeadLost"), ("worker-1", "WorkerLost")])
    def test_a_pod_deleted_by_hand_ends_the_job(self, trial: Trial, victim: str, reason: str) -> None:
        trial.start()
        trial.kubectl("delete", "pod", f"{trial.name}-{victim}", "--wait=false")
        assert trial.wait_condition("Failed")["reason"] == reason
        wait_for("GPUs freed", lambda: not trial.gpus_held())


class TestRestart:
    @pytest.mark.parametrize("wait_seconds", [0.0, 0.05, 0.15, 0.3, 1.5])
    def test_an_operator_killed_while_it_creates_reaches_the_same_end(
        self, operator: Operator, trial: Trial, wait_seconds: float
    ) -> None:
        trial.apply()
        time.sleep(wait_seconds)
        operator.kill()
        operator.start()
        wait_for("running", lambda: trial.phase == "Running")
        assert trial.children() == ALL
        trial.order("head-0", "exit 0")
        trial.wait_condition("Complete")
        wait_for("GPUs freed", lambda: not trial.gpus_held())

    def test_a_job_that_ends_while_the_operator_is_away_is_still_told_truly(
        self, operator: Operator, trial: Trial
    ) -> None:
        trial.start()
        before = {role: pod["metadata"]["uid"] for role, pod in trial.pods().items()}
        operator.kill()
        try:
            trial.order("head-0", "exit 0")
            wait_for("head ended", lambda: trial.pods()["head-0"]["status"]["phase"] == "Succeeded")
            assert trial.phase == "Running"
            assert {role: pod["metadata"]["uid"] for role, pod in trial.pods().items()} == before
        finally:
            operator.start()
        trial.wait_condition("Complete")
        wait_for("GPUs freed", lambda: not trial.gpus_held())

    def test_a_job_deleted_while_the_operator_is_away_is_gone_too(self, operator: Operator, trial: Trial) -> None:
        trial.apply()
        wait_for("pods", lambda: len(trial.pods()) == 3)
        operator.kill()
        try:
            trial.kubectl("delete", "fmj", trial.name, "--timeout=60s")
            wait_for("nothing left", lambda: trial.children() == [])
        finally:
            operator.start()
        time.sleep(2)
        assert trial.children() == []


class TestPods:
    def test_every_pod_has_what_the_agent_relies_on(self, trial: Trial) -> None:
        trial.start()
        wait_for("ready workers", lambda: trial.status["workers"]["ready"] == 2)
        program = (
            "import json, os, socket; boot = json.load(open(os.environ['FOREMOE_BOOT_FILE']));"
            "places = ('/tmp', '/scratch', '/dev/shm', '/data', '/opt');"
            "env = {k: v for k, v in os.environ.items() if k in ('HOME', 'USER') or k.startswith('FOREMOE_')};"
            "print(json.dumps({'cwd': os.getcwd(), 'env': env, 'boot': boot, 'uid': os.getuid(),"
            "'head': socket.gethostbyname(boot['headHost']), 'host': socket.gethostname(),"
            "'writable': [d for d in places if os.access(d, os.W_OK)]}))"
        )
        told = json.loads(trial.kubectl("exec", f"{trial.name}-worker-1", "--", "python", "-c", program))
        worker, head = trial.pods()["worker-1"], trial.pods()["head-0"]
        assert told["boot"]["spec"]["totalSteps"] == 3
        assert (told["boot"]["job"], told["boot"]["headHost"]) == (trial.name, f"{trial.name}-head-0.{trial.name}-ray")
        assert told["head"] == head["status"]["podIP"] and told["host"] == f"{trial.name}-worker-1"
        assert told["env"] == {
            "FOREMOE_BOOT_FILE": "/etc/foremoe/boot.json",
            "FOREMOE_NODE_NAME": worker["spec"]["nodeName"],
            "FOREMOE_POD_IP": worker["status"]["podIP"],
            "FOREMOE_ROLE": "worker",
            "FOREMOE_TERMINATION_FILE": "/dev/termination-log",
            "FOREMOE_WORKER_INDEX": "1",
            "HOME": "/scratch",
            "USER": "foremoe",
        }
        assert (told["cwd"], told["uid"]) == ("/scratch", 1000)
        assert told["writable"] == ["/tmp", "/scratch", "/dev/shm", "/data"]
