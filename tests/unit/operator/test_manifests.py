"""The objects of a job, as the API server gets them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.operator.builders import UID, job

from foremoe_operator.api.boot import BootConfig
from foremoe_operator.core.manifests import parts


def built(**spec: Any) -> dict[str, dict[str, Any]]:
    subject = job(**spec)
    assert subject.spec is not None
    return {name: build() for _, name, build in parts(subject, subject.spec, 1)}  # type: ignore[misc]


def pods(**spec: Any) -> list[dict[str, Any]]:
    return [each for each in built(**spec).values() if each["kind"] == "Pod"]


def test_the_name_of_a_part_is_the_name_of_what_is_built() -> None:
    for name, each in built().items():
        assert each["metadata"]["name"] == name


def test_every_object_is_owned_and_labelled() -> None:
    for name, each in built().items():
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["kind"]) == (UID, True, "ForeMoEJob")
        labels = each["metadata"]["labels"]
        assert (labels["foremoe.io/job"], labels["foremoe.io/attempt"]) == ("tiny", "1")
        assert labels["app.kubernetes.io/managed-by"] == "foremoe-operator"
        assert ("foremoe.io/worker-index" in labels) == ("worker" in name)


@pytest.mark.parametrize("pod", pods(), ids=lambda pod: pod["metadata"]["name"])
def test_pods_pass_the_restricted_level(pod: dict[str, Any]) -> None:
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert {next(iter(each.keys() - {"name"})) for each in spec["volumes"]} <= {
        "emptyDir", "configMap", "persistentVolumeClaim",
    }  # fmt: skip


def test_only_workers_ask_for_gpus_and_nobody_has_a_cpu_limit() -> None:
    for pod in pods(
        workers={"replicas": 2, "gpusPerWorker": 4, "resources": {"cpu": "8", "memory": "64Gi"}}, parallelism={}
    ):
        resources = pod["spec"]["containers"][0]["resources"]
        if "head" in pod["metadata"]["name"]:
            assert resources == {"requests": {"cpu": "100m"}}
        else:
            assert resources["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "4"}
            assert resources["requests"] == {"cpu": "8", "memory": "64Gi"}


def test_pods_find_each_other_by_name_before_they_are_ready() -> None:
    objects = built()
    service, head = objects["tiny-ray"], objects["tiny-head-0"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"foremoe.io/job": "tiny"}
    assert (head["spec"]["hostname"], head["spec"]["subdomain"]) == ("tiny-head-0", "tiny-ray")


def test_the_boot_file_is_what_the_agent_reads() -> None:
    boot = built()["tiny-boot-1"]
    assert boot["immutable"] is True
    config = BootConfig.model_validate(json.loads(boot["data"]["boot.json"]))
    assert (config.job, config.namespace, config.head_host) == ("tiny", "ns", "tiny-head-0.tiny-ray")
    assert config.spec == job().spec


def test_claims_are_mounted_in_every_pod() -> None:
    volumes = [
        {"name": "data", "claimName": "a", "mountPath": "/data"},
        {"name": "models", "claimName": "b", "mountPath": "/models", "readOnly": True},
    ]
    for pod in pods(volumes=volumes):
        mounts = {each["name"]: each for each in pod["spec"]["containers"][0]["volumeMounts"]}
        claims = {each["name"]: each.get("persistentVolumeClaim") for each in pod["spec"]["volumes"]}
        assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
        assert claims["models"] == {"claimName": "b", "readOnly": True}
        assert claims.keys() == mounts.keys()


def test_names_stay_host_names_up_to_the_longest_job_name() -> None:
    subject = job()
    assert subject.spec is not None
    longest = "a" * 50
    names = [name for _, name, _ in parts(type(subject)(**{**vars(subject), "name": longest}), subject.spec, 1)]
    assert max(len(f"{longest}-worker-4095"), *(len(name) for name in names)) <= 63


def test_node_selectors_go_to_their_pods() -> None:
    workers = {"replicas": 1, "gpusPerWorker": 2, "nodeSelector": {"pool": "gpu"}}
    head, worker = pods(workers=workers, head={"nodeSelector": {"pool": "cpu"}})
    assert head["spec"]["nodeSelector"] == {"pool": "cpu"} and worker["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert "nodeSelector" not in pods()[0]["spec"]
