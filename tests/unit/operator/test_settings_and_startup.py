"""Settings from the environment, the look at the served CRD, and metrics that go with their job."""

from __future__ import annotations

import copy
from typing import cast

import pytest
from prometheus_client import REGISTRY
from tests.unit.operator.builders import running_job

from foremoe_operator import metrics
from foremoe_operator.__main__ import main
from foremoe_operator.api.generate import job_crd
from foremoe_operator.kube.client import KubeClient, KubeError
from foremoe_operator.kube.startup import crd_problem, missing_fields
from foremoe_operator.settings import Settings, SettingsError, describe


def test_defaults_need_no_environment() -> None:
    settings = Settings.from_environment({})
    assert settings.namespaces == () and settings.limits.poll_seconds == 5.0


def test_every_setting_is_read_and_described() -> None:
    settings = Settings.from_environment(
        {"FOREMOE_OPERATOR_NAMESPACES": "a, b,", "FOREMOE_OPERATOR_POLL_SECONDS": "0.5", "OTHER": "x"}
    )
    assert settings.namespaces == ("a", "b") and settings.limits.poll_seconds == 0.5
    for name in vars(settings):
        assert f"FOREMOE_OPERATOR_{name.upper()} " in describe()


@pytest.mark.parametrize(
    ("name", "value"), [("WORKERS", "many"), ("WORKERS", "0"), ("LOG_FORMAT", "xml"), ("LOG_LEVEL", "LOUD")]
)
def test_a_bad_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"FOREMOE_OPERATOR_{name}"):
        Settings.from_environment({f"FOREMOE_OPERATOR_{name}": value})


def test_the_command_line_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "FOREMOE_OPERATOR_POLL_SECONDS" in capsys.readouterr().out
    assert main(["--nonsense"]) == 2


def test_our_own_crd_has_every_field() -> None:
    assert missing_fields(job_crd()) == []


def test_an_older_crd_is_found_out() -> None:
    crd: dict[str, object] = copy.deepcopy(job_crd())  # type: ignore[arg-type]
    status = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]  # type: ignore[index]
    del status["progress"]["properties"]["balance"]
    missing = missing_fields(crd)
    assert "status.progress.balance.mean" in missing
    assert all(each.startswith("status.progress.balance") for each in missing)
    crd["spec"]["versions"][0]["served"] = False  # type: ignore[index]
    assert missing_fields(crd) == ["version v1alpha1"]


@pytest.mark.parametrize(("code", "answer"), [(404, "the cluster has no foremoejobs.foremoe.io"), (403, None)])
def test_a_cluster_without_the_crd_is_told_what_to_do(code: int, answer: str | None) -> None:
    class Client:
        def request_blocking(self, call: object) -> None:
            raise KubeError("no", code=code)

    client = cast(KubeClient, Client())
    if answer is None:
        with pytest.raises(KubeError):
            crd_problem(client)
    else:
        problem = crd_problem(client)
        assert problem is not None and answer in problem and "crds.install=true" in problem


def test_metrics_of_a_job_go_with_it() -> None:
    subject = running_job()
    metrics.observe(subject, subject.status)
    labels = {"namespace": "ns", "job": "tiny"}
    assert REGISTRY.get_sample_value("foremoe_job_status", {**labels, "phase": "Running"}) == 1
    assert REGISTRY.get_sample_value("foremoe_job_allocated_gpus", labels) == 2
    metrics.forget(("ns", "tiny"))
    assert REGISTRY.get_sample_value("foremoe_job_status", {**labels, "phase": "Running"}) is None
    assert not [s for f in REGISTRY.collect() for s in f.samples if s.labels.get("job") == "tiny"]
