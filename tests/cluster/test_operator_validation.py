"""The API server itself refuses what is wrong with a manifest, in words that name the field."""

from __future__ import annotations

import json

import pytest

from foremoe_cluster.errors import ClusterError
from foremoe_operator.kube.client import Call, KubeClient, KubeError
from tests.cluster.conftest import Namespace, manifest
from tests.unit.operator import builders
from tests.unit.operator.invalid_jobs import Case, cases

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]
_PATH = "/apis/foremoe.io/v1alpha1/namespaces/default/foremoejobs"


def post(client: KubeClient, job: dict[str, object]) -> dict[str, object]:
    """Create without storing, as strict about unknown fields as kubectl is."""
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    return client.request_blocking(Call(method="POST", path=_PATH, query=query, body=job))


def test_a_valid_manifest_passes_and_gets_its_defaults(client: KubeClient) -> None:
    spec = post(client, builders.manifest(parallelism={}))["spec"]
    assert isinstance(spec, dict)
    assert spec["imagePullPolicy"] == "IfNotPresent"
    assert spec["parallelism"] == {"expert": 1}
    assert spec["checkpoint"] == {"path": "/data/checkpoints", "everySteps": 50, "resume": "Auto"}
    assert (spec["startupDeadlineSeconds"], spec["terminationGracePeriodSeconds"]) == (1800, 60)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_mistake_is_refused_and_named(client: KubeClient, case: Case) -> None:
    with pytest.raises(KubeError) as refusal:
        post(client, case.manifest(builders.manifest()))
    assert refusal.value.code in (400, 422)
    text = str(refusal.value)
    missing = [word for word in case.expect if word not in text]
    assert not missing, f"{missing} not in: {text}"


@pytest.mark.parametrize("name", ["a", "tiny", "a23456789-123456789-123456789-123456789-123456789"])
def test_names_up_to_50_characters_pass(client: KubeClient, name: str) -> None:
    post(client, builders.manifest(name=name))


def test_null_means_not_set(client: KubeClient) -> None:
    spec = post(client, builders.manifest(activeDeadlineSeconds=None, trace=None))["spec"]
    assert isinstance(spec, dict) and not {"activeDeadlineSeconds", "trace"} & spec.keys()


def test_the_spec_cannot_be_changed_and_kubectl_says_so(namespace: Namespace) -> None:
    namespace.apply(manifest("tiny"))
    changed = manifest("tiny")
    changed["spec"]["totalSteps"] = 9
    with pytest.raises(ClusterError, match="spec is immutable"):
        namespace.kubectl("apply", "-f", "-", stdin=json.dumps(changed))
    namespace.kubectl("label", "fmj", "tiny", "team=a")


def test_kubectl_explains_every_field(namespace: Namespace) -> None:
    text = namespace.kubectl("explain", "fmj", "--recursive", "--api-version=foremoe.io/v1alpha1")
    for word in ("spec", "everySteps", "gpusPerWorker", "status", "lastFailure", "logTail"):
        assert word in text
    assert "Expert-parallel size" in namespace.kubectl("explain", "fmj.spec.parallelism.expert")
    assert "Last lines of its output" in namespace.kubectl("explain", "fmj.status.lastFailure.logTail")
