"""What the cluster tests stand on: a real API server, the operator as a process with the chart's own rights, pods.

The operator runs from this working tree with a token of the service account that the chart makes, so that a right it
lacks shows here. An operator that is installed in the cluster is scaled down meanwhile: two would race.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from foremoe_cluster.kubectl import Tools
from foremoe_cluster.settings import KUBECONFIG
from foremoe_operator.kube.client import Call, KubeClient, KubeError
from foremoe_operator.kube.startup import missing_fields

ROOT = Path(__file__).parents[2]
FAKE_AGENT = Path(__file__).parent / "fake_agent.py"
IMAGE = os.environ.get("FOREMOE_TEST_IMAGE", "localhost/foremoe-operator:dev")
WORKER_IMAGE = os.environ.get("FOREMOE_TEST_WORKER_IMAGE", "localhost/foremoe-worker:dev")
# Also the name of release and service account; of this session alone, as a namespace takes a while to go.
OPERATOR = f"foremoe-test-{uuid.uuid4().hex[:6]}"


def wait_for(what: str, probe: Callable[[], Any], *, seconds: float = 60.0) -> Any:
    """Ask until the answer is true; fail with the last answer."""
    end = time.monotonic() + seconds
    while not (answer := probe()):
        if time.monotonic() > end:
            pytest.fail(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return answer


@pytest.fixture(scope="package")
def tools() -> Tools:
    """kubectl and helm against $KUBECONFIG, else the embedded cluster."""
    path = Path(os.environ.get("KUBECONFIG") or KUBECONFIG)
    if not path.is_file():
        pytest.fail(f"no cluster: {path} does not exist. Run `make cluster-up images`, or set KUBECONFIG")
    return Tools.embedded(path) if path == KUBECONFIG else Tools.installed(path)


@pytest.fixture(scope="package")
def crd(tools: Tools) -> Iterator[None]:
    """The custom resource of this working tree. Left as it was found: helm refuses a CRD that is not its own."""
    name = "foremoejobs.foremoe.io"
    wanted = yaml.safe_load((ROOT / f"crds/{name}.yaml").read_text())
    found = tools.get("crd", name)
    if found is None or missing_fields(found) or _schema_of(found) != _schema_of(wanted):
        # helm's own manager, so that its next upgrade meets no conflict.
        words = ("apply", "--server-side", "--force-conflicts", "--field-manager=helm")
        tools.kubectl(*words, "-f", str(ROOT / "crds"))
    tools.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")
    yield
    if found is None:
        tools.kubectl("delete", "crd", name, "--timeout=60s")


def _schema_of(crd: dict[str, Any]) -> object:
    return crd["spec"]["versions"][0]["schema"]


@pytest.fixture(scope="package")
def operator_kubeconfig(tools: Tools, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig with the chart's service account and nothing more."""
    tools.kubectl("apply", "-f", "-", stdin=_namespace(OPERATOR))
    rendered = tools.helm(
        "template", OPERATOR, str(ROOT / "charts/foremoe"), "-n", OPERATOR,
        "--show-only", "templates/rbac.yaml", "--show-only", "templates/serviceaccount.yaml",
    )  # fmt: skip
    tools.kubectl("apply", "-f", "-", stdin=rendered)
    token = tools.kubectl("-n", OPERATOR, "create", "token", OPERATOR, "--duration=2h").strip()
    config = yaml.safe_load(tools.kubectl("config", "view", "--raw", "--flatten", "--minify"))
    config["users"] = [{"name": "operator", "user": {"token": token}}]
    config["contexts"][0]["context"]["user"] = "operator"
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    yield path
    tools.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=rendered)
    tools.kubectl("delete", "namespace", OPERATOR, "--wait=false")


def errors_in(log: str) -> str:
    """What no operator's log may have: an exception, or a right that it lacks.

    An event for a job whose namespace goes away is refused as Forbidden too, and no right would help.
    """
    lines = [line for line in log.splitlines() if "because it is being terminated" not in line]
    starts = [
        number for number, line in enumerate(lines) if re.search(r"Traceback|Forbidden|cannot \w+ resource", line)
    ]
    return "\n...\n".join("\n".join(lines[number : number + 40]) for number in starts[:5])


@pytest.fixture(scope="package")
def alone(tools: Tools) -> Iterator[None]:
    """Scales an installed operator down for the time of the tests."""
    words = ("deployment", "-A", "-l", "app.kubernetes.io/part-of=foremoe,app.kubernetes.io/component=operator")
    found = [
        (each["metadata"]["namespace"], each["metadata"]["name"], each["spec"]["replicas"])
        for each in json.loads(tools.kubectl("get", *words, "-o", "json"))["items"]
    ]
    for namespace, name, _ in found:
        tools.kubectl("-n", namespace, "scale", f"deployment/{name}", "--replicas=0")
        tools.kubectl("-n", namespace, "wait", "--for=delete", "pod", "-l", words[3], "--timeout=60s")
    yield
    for namespace, name, replicas in found:
        tools.kubectl("-n", namespace, "scale", f"deployment/{name}", f"--replicas={replicas}")


@dataclass
class Operator:
    """The operator as a process that can be killed and started again."""

    kubeconfig: Path
    log: Path
    settings: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    health_port: int = 0
    metrics_port: int = 0

    def start(self) -> None:
        self.health_port, self.metrics_port = _free_ports()
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'worker'}",
            "FOREMOE_OPERATOR_LISTEN_HOST": "127.0.0.1",
            "FOREMOE_OPERATOR_HEALTH_PORT": str(self.health_port),
            "FOREMOE_OPERATOR_METRICS_PORT": str(self.metrics_port),
            "FOREMOE_OPERATOR_POLL_SECONDS": "1",
            **self.settings,
        }
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "foremoe_operator"], env=environment, stdout=output, stderr=output
            )

    def kill(self) -> None:
        """End it without giving it a chance to finish anything."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@pytest.fixture(scope="package")
def operator(operator_kubeconfig: Path, alone: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """One operator for all tests; a test that kills it starts it again."""
    made = Operator(kubeconfig=operator_kubeconfig, log=tmp_path_factory.mktemp("log") / "operator.log")
    made.start()
    yield made
    assert made.alive, f"the operator died:\n{made.log.read_text()[-4000:]}"
    assert made.stop() == 0, made.log.read_text()[-4000:]
    assert not (errors := errors_in(made.log.read_text())), errors


@dataclass(frozen=True)
class Namespace:
    """A namespace under the restricted Pod Security level."""

    name: str
    tools: Tools
    client: KubeClient

    def kubectl(self, *words: str, stdin: str | None = None, timeout: float = 120.0) -> str:
        return self.tools.kubectl("-n", self.name, *words, stdin=stdin, timeout=timeout)

    def apply(self, manifest: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def read(self, kind: str, name: str = "", **query: str) -> dict[str, Any]:
        """GET one object or a list; empty if it does not exist. Cheaper than a kubectl for each question."""
        prefix = "/apis/foremoe.io/v1alpha1" if kind == "foremoejobs" else "/api/v1"
        path = f"{prefix}/namespaces/{self.name}/{kind}" + (f"/{name}" if name else "")
        try:
            return dict(self.client.request_blocking(Call(method="GET", path=path, query=query)))
        except KubeError as error:
            if error.code == 404:
                return {}
            raise

    def run_on_volume(self, program: str) -> None:
        """Run a Python program in a pod with the shared volume at /data."""
        self.apply(_writer("writer", program))
        self.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/writer", "--timeout=60s")
        self.kubectl("delete", "pod", "writer", "--now", "--wait=false")


@dataclass(frozen=True)
class Trial:
    """One job in one namespace, from its manifest to its last trace."""

    namespace: Namespace
    name: str

    def apply(self, **spec: Any) -> None:
        """Create the job; its pods run the fake agent unless `env` says otherwise."""
        self.namespace.apply(manifest(self.name, **spec))

    def kubectl(self, *words: str) -> str:
        return self.namespace.kubectl(*words)

    def wait_condition(self, kind: str, *, seconds: int = 90) -> dict[str, Any]:
        """As a user would wait for it."""
        self.kubectl("wait", f"--for=condition={kind}", f"fmj/{self.name}", f"--timeout={seconds}s")
        return self.condition(kind)

    @property
    def job(self) -> dict[str, Any]:
        return self.namespace.read("foremoejobs", self.name)

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job.get("status", {}))

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", ""))

    def condition(self, kind: str) -> dict[str, Any]:
        conditions = {each["type"]: each for each in self.status.get("conditions", [])}
        return dict(conditions.get(kind, {}))

    def pods(self) -> dict[str, dict[str, Any]]:
        """Pods by what they are: head-0, worker-0, ..."""
        found = self.namespace.read("pods", labelSelector=f"foremoe.io/job={self.name}").get("items", [])
        return {each["metadata"]["name"].removeprefix(f"{self.name}-"): each for each in found}

    def gpus_held(self) -> list[str]:
        """Pods that still hold a GPU."""
        resources = {role: pod["spec"]["containers"][0]["resources"] for role, pod in self.pods().items()}
        return [role for role, each in resources.items() if "nvidia.com/gpu" in each.get("limits", {})]

    def children(self) -> list[str]:
        """Kind and name, without the job's, of every object that carries the job's label."""
        found = []
        for kind in ("configmaps", "pods", "services"):
            items = self.namespace.read(kind, labelSelector=f"foremoe.io/job={self.name}").get("items", [])
            found += [f"{kind}/{each['metadata']['name'].removeprefix(self.name + '-')}" for each in items]
        return sorted(found)

    def events(self) -> set[str]:
        selector = f"involvedObject.name={self.name},involvedObject.kind=ForeMoEJob"
        return {each["reason"] for each in self.namespace.read("events", fieldSelector=selector).get("items", [])}

    def order(self, role: str, text: str) -> None:
        """Tell the fake agent of a pod what to do."""
        address = self.pods()[role]["status"]["podIP"]
        httpx.post(f"http://{address}:8470/order", content=text, trust_env=False).raise_for_status()

    def start(self, **spec: Any) -> None:
        """Create the job and wait until it runs."""
        self.apply(**spec)
        wait_for("running", lambda: self.phase == "Running")


@pytest.fixture(scope="package")
def client(tools: Tools) -> KubeClient:
    """The API server as an administrator sees it."""
    configuration = Configuration()
    load_kube_config(str(tools.kubeconfig), client_configuration=configuration)
    return KubeClient(configuration)


def _make_namespace(tools: Tools, client: KubeClient) -> Iterator[Namespace]:
    made = Namespace(f"t-{uuid.uuid4().hex[:8]}", tools, client)
    tools.kubectl("apply", "-f", "-", stdin=_namespace(made.name))
    yield made
    made.kubectl("delete", "fmj", "--all", "--wait=false")
    tools.kubectl("delete", "namespace", made.name, "--wait=false")


@pytest.fixture
def namespace(tools: Tools, client: KubeClient, crd: None) -> Iterator[Namespace]:
    """An empty namespace of the test's own."""
    yield from _make_namespace(tools, client)


@pytest.fixture(scope="package")
def shared_namespace(tools: Tools, client: KubeClient, crd: None) -> Iterator[Namespace]:
    """A namespace with a claim `shared` that holds the fake agent."""
    for made in _make_namespace(tools, client):
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "shared"},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
        }
        made.apply(claim)
        code = base64.b64encode(FAKE_AGENT.read_bytes()).decode()
        made.run_on_volume(
            "import base64, pathlib; root = pathlib.Path('/data/fake/foremoe'); root.mkdir(parents=True);"
            " (root / '__init__.py').touch();"
            f" (root / 'agent.py').write_bytes(base64.b64decode('{code}'))"
        )
        yield made


@pytest.fixture
def trial(operator: Operator, shared_namespace: Namespace) -> Iterator[Trial]:
    """A job of the test's own, gone afterwards."""
    made = Trial(shared_namespace, f"job-{uuid.uuid4().hex[:6]}")
    yield made
    made.kubectl("delete", "fmj", made.name, "--ignore-not-found", "--timeout=60s")


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """A valid job of two workers with one GPU each, whose pods run the fake agent from the shared volume."""
    env = spec.pop("env", {})
    base: dict[str, Any] = {
        "image": IMAGE,
        "model": {"path": "/data/model"},
        "data": {"trainFiles": ["/data/train.parquet"]},
        "totalSteps": 3,
        "workers": {"replicas": 2, "gpusPerWorker": 1},
        "volumes": [{"name": "data", "claimName": "shared", "mountPath": "/data"}],
        "checkpoint": {"path": "/data/checkpoints"},
        "terminationGracePeriodSeconds": 1,
        "env": [{"name": key, "value": value} for key, value in {"PYTHONPATH": "/data/fake", **env}.items()],
    }
    return {
        "apiVersion": "foremoe.io/v1alpha1",
        "kind": "ForeMoEJob",
        "metadata": {"name": name},
        "spec": {**base, **spec},
    }


def _namespace(name: str) -> str:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})


def _writer(name: str, program: str) -> dict[str, Any]:
    container = {
        "name": "writer",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", program],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    security = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": security,
        "containers": [container],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "shared"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]), int(other.getsockname()[1])
