"""The embedded cluster itself: what a job will ask of it, tried with plain pods and the operator image."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foremoe_cluster.api import Api
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.kubectl import Tools
from foremoe_cluster.lifecycle import ready_nodes
from foremoe_cluster.settings import KUBECONFIG, STORAGE_CLASS
from tests.cluster.conftest import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        os.environ.get("KUBECONFIG", str(KUBECONFIG)) != str(KUBECONFIG), reason="KUBECONFIG is another cluster's"
    ),
]
IMAGE = "localhost/foremoe-operator:dev"
SERVER = "python -m http.server 8000 --directory /data"
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode(), end='')"


def nodes() -> list[dict[str, Any]]:
    with Api() as api:
        return api.items("/api/v1/nodes")


def image_size(node: dict[str, Any], name: str) -> int:
    """Unpacked size in bytes, 0 while the node does not list it."""
    images = node["status"].get("images", [])
    return next((int(image["sizeBytes"]) for image in images if name in (image.get("names") or [])), 0)


@dataclass(frozen=True)
class Playground:
    """A namespace with two pods, one per node, under a headless service, sharing a volume."""

    tools: Tools
    namespace: str

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.tools.kubectl("-n", self.namespace, *words, stdin=stdin)

    def python(self, pod: str, program: str, *arguments: str) -> str:
        return self.kubectl("exec", pod, "--", "python", "-c", program, *arguments)

    def addresses(self, service: str) -> int:
        """How many ready addresses the service has; they follow the pods' readiness with a delay."""
        label = f"kubernetes.io/service-name={service}"
        slices = json.loads(self.kubectl("get", "endpointslices", "-l", label, "-o", "json"))["items"]
        return sum(each["conditions"].get("ready", False) for item in slices for each in item.get("endpoints") or [])

    def address(self, pod: str) -> str:
        return self.kubectl("get", "pod", pod, "-o", "jsonpath={.status.podIP}")


def pod(number: int, **changes: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", f"exec {SERVER}"],
        "resources": {"requests": {"cpu": "50m"}, "limits": {"nvidia.com/gpu": 1}},
        "readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec = {
        "hostname": f"pod-{number}",
        "subdomain": "group",
        "nodeSelector": {"kubernetes.io/hostname": f"node{number}"},
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}],
        "containers": [container | changes],
    }
    metadata = {"name": f"pod-{number}", "labels": {"app": "group"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


@pytest.fixture(scope="module")
def playground(tools: Tools) -> Iterator[Playground]:
    made = Playground(tools, f"embedded-{uuid.uuid4().hex[:6]}")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": made.namespace, "labels": labels}},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "shared"},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "group"},
            "spec": {"clusterIP": "None", "selector": {"app": "group"}, "ports": [{"port": 8000}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "balanced"},
            "spec": {"selector": {"app": "group"}, "ports": [{"port": 80, "targetPort": 8000}]},
        },
        pod(1),
        pod(2),
    ]
    for manifest in objects:
        made.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    try:
        made.kubectl("wait", "--for=condition=Ready", "pod", "--all", "--timeout=90s")
        for service in ("group", "balanced"):
            wait_for(f"both pods behind {service}", lambda service=service: made.addresses(service) == 2)
        yield made
    finally:
        tools.kubectl("delete", "namespace", made.namespace, "--wait=false")


def test_two_nodes_are_ready() -> None:
    with Api() as api:
        assert ready_nodes(api)[:2] == ["node1", "node2"]


def test_nodes_offer_gpus_and_say_that_they_are_stand_ins() -> None:
    for node in nodes():
        labels = node["metadata"]["labels"]
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == labels["nvidia.com/gpu.count"]
        assert labels["foremoe.io/stand-in-gpus"] == "true"
        assert labels["nvidia.com/gpu.present"] == "true"
    cliques = {node["metadata"]["labels"]["nvidia.com/gpu.clique"] for node in nodes()}
    assert len(cliques) == len(nodes()), "each node is an NVLink domain of its own"


def test_pods_get_different_gpus(playground: Playground) -> None:
    program = "import os; print(os.environ['NVIDIA_VISIBLE_DEVICES'])"
    ids = [playground.python(f"pod-{number}", program).strip() for number in (1, 2)]
    assert all(each.startswith("GPU-") and "," not in each for each in ids)
    assert len(set(ids)) == 2


@pytest.mark.parametrize(("client", "server"), [(1, 2), (2, 1), (1, 1)])
def test_headless_names_resolve_to_the_pod_across_nodes(playground: Playground, client: int, server: int) -> None:
    program = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    for name in (f"pod-{server}.group", f"pod-{server}.group.{playground.namespace}.svc.cluster.local"):
        assert playground.python(f"pod-{client}", program, name).strip() == playground.address(f"pod-{server}")


def test_a_volume_written_on_one_node_is_read_through_the_other(playground: Playground) -> None:
    playground.python("pod-1", "open('/data/hello', 'w').write('from node1')")
    assert playground.python("pod-2", "print(open('/data/hello').read())").strip() == "from node1"
    url = f"http://{playground.address('pod-2')}:8000/hello"
    assert playground.python("pod-1", FETCH, url) == "from node1"


def test_cluster_addresses_of_services_work_from_pods(playground: Playground) -> None:
    playground.python("pod-1", "open('/data/service', 'w').write('yes')")
    assert playground.python("pod-2", FETCH, "http://balanced/service") == "yes"


def test_pods_reach_the_api_server(playground: Playground) -> None:
    program = (
        "import ssl, urllib.request as r;"
        "print(r.urlopen('https://kubernetes.default.svc/version', context=ssl._create_unverified_context()).status)"
    )
    assert playground.python("pod-1", program).strip() == "200"


def test_pods_have_no_way_out(playground: Playground) -> None:
    """The guard on the bridge: an address outside the cluster's networks is never reached (192.0.2.0/24: RFC 5737)."""
    program = (
        "import socket\n"
        "try: socket.create_connection(('192.0.2.1', 80), timeout=2); print('connected')\n"
        "except OSError: print('stopped')"
    )
    assert playground.python("pod-1", program).strip() == "stopped"


def test_the_images_run_without_rights(playground: Playground) -> None:
    program = "import os; print(os.getuid(), os.access('/opt/venv', os.W_OK), os.access('/data', os.W_OK))"
    assert playground.python("pod-1", program).strip() == "1000 False True"


def test_pod_security_is_enforced(playground: Playground) -> None:
    bare = pod(3) | {"metadata": {"name": "bare"}}
    bare["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        playground.kubectl("apply", "-f", "-", stdin=json.dumps(bare))


def test_logs_are_there(playground: Playground) -> None:
    playground.python("pod-1", FETCH, f"http://{playground.address('pod-2')}:8000/")
    assert '"GET / HTTP/1.1" 200' in playground.kubectl("logs", "pod-2")


def test_the_operator_image_is_small_and_has_no_training_stack(playground: Playground) -> None:
    # A kubelet tells of a new image within half a minute.
    wait_for("both nodes list the image", lambda: all(image_size(node, IMAGE) for node in nodes()))
    assert max(image_size(node, IMAGE) for node in nodes()) <= 300e6
    program = "import importlib.util as u; print([n for n in ('torch', 'ray', 'verl', 'pip') if u.find_spec(n)])"
    assert playground.python("pod-1", program).strip() == "[]"


def test_a_deleted_claim_takes_its_folder_along(tools: Tools) -> None:
    name = f"claim-{uuid.uuid4().hex[:6]}"
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    tools.kubectl("apply", "-f", "-", stdin=json.dumps(claim))
    tools.kubectl("wait", "--for=jsonpath={.status.phase}=Bound", f"pvc/{name}", "--timeout=30s")
    bound = tools.get("pvc", name)
    assert bound is not None and bound["spec"]["storageClassName"] == STORAGE_CLASS
    volume = tools.get("pv", bound["spec"]["volumeName"])
    assert volume is not None
    folder = Path(volume["spec"]["hostPath"]["path"])
    assert folder.is_dir()
    tools.kubectl("delete", "pvc", name)
    tools.kubectl("wait", "--for=delete", f"pv/{volume['metadata']['name']}", "--timeout=30s")
    assert not folder.exists()
