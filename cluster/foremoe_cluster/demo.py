"""`make demo`: from a fresh machine to a finished training job, every phase with its time.

The demo does what a user would do by hand, with the same tools: bring up a cluster (or take the user's), load the
images, install the chart with helm, prepare a model and data on a shared volume, apply the example job and watch its
status. It reads nothing but the API server, so what it shows is what `kubectl` shows. It can be repeated: a job of an
earlier run is replaced. The cluster stays up, so that one can look around afterwards.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from rich.table import Table

from foremoe_cluster import images, lifecycle
from foremoe_cluster.errors import ClusterError
from foremoe_cluster.kubectl import Tools
from foremoe_cluster.progress import console, note
from foremoe_cluster.settings import KUBECONFIG, Settings

T = TypeVar("T")

ROOT: Final = Path(__file__).resolve().parents[2]
PREPARE: Final = ROOT / "examples" / "prepare-tiny-moe.yaml"
JOB: Final = ROOT / "examples" / "grpo-tiny-moe.yaml"
CHART: Final = ROOT / "charts" / "foremoe"
NAMESPACE: Final = "foremoe-demo"
OPERATOR_NAMESPACE: Final = "foremoe-system"
PREPARE_SECONDS: Final = 900.0
JOB_SECONDS: Final = 1800.0
POLL_SECONDS: Final = 2.0
"""Each look is a kubectl process, a tenth of a second of a core that the training wants too."""


class Timings:
    """The time each phase took, printed as the phases pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Print the name when the phase begins and its time when it ends."""
        console.print(f"[bold]==[/] {name}")
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began
        console.print(f"[bold]==[/] {name}: [green]{self.seconds[name]:.1f} s[/]")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Where a run happens: the cluster's tools and the images its nodes can start."""

    tools: Tools
    worker_image: str
    operator_image: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished demo leaves: the job, its last status, the reward of every step that was seen."""

    tools: Tools
    job: str
    status: dict[str, Any]
    rewards: dict[int, float]


def demo(*, kubeconfig: Path | None, image: str | None, operator_image: str | None) -> Outcome:
    """Run the demo. Raises ClusterError, saying what to look at, if the job does not complete."""
    timings = Timings()
    if kubeconfig is None and image is None:
        run = _embedded(timings)
    elif kubeconfig is not None and image is not None and operator_image is not None:
        run = Demo(tools=Tools.installed(kubeconfig), worker_image=image, operator_image=operator_image)
    else:
        raise ClusterError(
            "a cluster of your own needs KUBECONFIG, IMAGE and OPERATOR_IMAGE; give none for the embedded one"
        )
    with timings.phase("operator installed by helm"):
        _install_operator(run)
    with timings.phase("model and data prepared"):
        _prepare(run)
    with timings.phase("training job complete"):
        outcome = _train(run)
    _summary(outcome, timings)
    return outcome


def _embedded(timings: Timings) -> Demo:
    settings = Settings.from_environment()
    with timings.phase("cluster up"):
        lifecycle.up(settings)
    with timings.phase("images built and loaded"):
        images.build_and_load(settings)
    return Demo(
        tools=Tools.embedded(KUBECONFIG),
        worker_image=images.name_of("worker"),
        operator_image=images.name_of("operator"),
    )


def _install_operator(run: Demo) -> None:
    repository, _, tag = run.operator_image.rpartition(":")
    run.tools.helm(
        "upgrade", "--install", "foremoe", str(CHART),
        "--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", "3m",
        "--take-ownership", "--force-conflicts",  # a CRD that was applied by hand becomes the release's
        "--set", f"image.repository={repository}", "--set", f"image.tag={tag}",
    )  # fmt: skip
    # The tag of a development image does not change with its content, so the pod has to be told.
    run.tools.kubectl("-n", OPERATOR_NAMESPACE, "rollout", "restart", "deployment")
    run.tools.kubectl("-n", OPERATOR_NAMESPACE, "rollout", "status", "deployment", "--timeout=120s", timeout=150)


def _prepare(run: Demo) -> None:
    _create_namespace(run)
    run.tools.kubectl("-n", NAMESPACE, "delete", "fmj", "--all", "--wait", "--timeout=120s", timeout=150)
    manifests = _with_image(PREPARE, run.worker_image)
    jobs = [manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Job"]
    for name in jobs:
        run.tools.kubectl("-n", NAMESPACE, "delete", "job", name, "--ignore-not-found", "--wait")
    run.tools.kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))
    for name in jobs:
        _poll(f"job/{name}", lambda name=name: _job_done(run, name), seconds=PREPARE_SECONDS)  # type: ignore[misc]


def _create_namespace(run: Demo) -> None:
    namespace = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
    }
    run.tools.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(namespace))


def _job_done(run: Demo, name: str) -> bool:
    job = run.tools.get("-n", NAMESPACE, "job", name) or {}
    conditions = {entry["type"]: entry for entry in job.get("status", {}).get("conditions", [])}
    if conditions.get("Failed", {}).get("status") == "True":
        log = run.tools.kubectl("-n", NAMESPACE, "logs", f"job/{name}", "--tail=20")
        raise ClusterError(f"{name} failed: {conditions['Failed'].get('message')}\n{log}")
    return bool(conditions.get("Complete", {}).get("status") == "True")


def _train(run: Demo) -> Outcome:
    manifests = _with_image(JOB, run.worker_image)
    name = next(manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "ForeMoEJob")
    run.tools.kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=yaml.safe_dump_all(manifests))
    view = _StatusView()

    def finished() -> dict[str, Any]:
        job = run.tools.get("-n", NAMESPACE, "fmj", name) or {}
        status: dict[str, Any] = job.get("status", {})
        view.show(status)
        return status if status.get("phase") in ("Complete", "Failed") else {}

    status = _poll(f"fmj/{name}", finished, seconds=JOB_SECONDS)
    if status["phase"] != "Complete":
        raise ClusterError(_why_it_failed(run, name, status))
    return Outcome(tools=run.tools, job=name, status=status, rewards=view.rewards)


class _StatusView:
    """A line whenever the phase, a condition's reason or the step changes."""

    def __init__(self) -> None:
        self.rewards: dict[int, float] = {}
        self._last: tuple[object, ...] = ()
        self._began = time.monotonic()

    def show(self, status: dict[str, Any]) -> None:
        progress = status.get("progress") or {}
        step = int(progress.get("step") or 0)
        reasons = {entry["type"]: entry["reason"] for entry in status.get("conditions", [])}
        key = (status.get("phase"), step, *sorted(reasons.items()))
        if key == self._last:
            return
        self._last = key
        words = [f"{time.monotonic() - self._began:6.1f} s", f"{status.get('phase') or 'Pending':<9}"]
        if step and progress.get("reward") is not None:
            self.rewards[step] = float(progress["reward"])
            balance = progress.get("balance") or {}
            words.append(f"step {step}/{progress.get('totalSteps')}  reward {self.rewards[step]:.3f}")
            if balance:
                executed = balance.get("executed")
                words.append(
                    f"imbalance {float(balance['mean']):.2f}" + (f" -> {float(executed):.2f}" if executed else "")
                )
        else:
            words.append(" ".join(f"{kind}={reason}" for kind, reason in sorted(reasons.items())))
        console.print("   " + "  ".join(words), soft_wrap=True)


def _why_it_failed(run: Demo, name: str, status: dict[str, Any]) -> str:
    failure = status.get("lastFailure") or {}
    lines = [f"{name} failed: {failure.get('reason')}: {failure.get('message')}", str(failure.get("logTail") or "")]
    lines.append(f"look at: kubectl -n {NAMESPACE} describe fmj {name}; kubectl -n {NAMESPACE} logs {name}-head-0")
    lines.append(f"KUBECONFIG={run.tools.kubeconfig}")
    return "\n".join(lines)


def _summary(outcome: Outcome, timings: Timings) -> None:
    table = Table("phase", "seconds", box=None)
    for name, took in timings.seconds.items():
        table.add_row(name, f"{took:.1f}")
    table.add_row("[bold]in all", f"[bold]{sum(timings.seconds.values()):.1f}")
    console.print(table)
    if outcome.rewards:
        first, last = min(outcome.rewards), max(outcome.rewards)
        note(f"reward: {outcome.rewards[first]:.3f} at step {first}, {outcome.rewards[last]:.3f} at step {last}")
    note(f"checkpoint: {(outcome.status.get('checkpoint') or {}).get('path')}")
    tools = outcome.tools
    row = tools.kubectl("-n", NAMESPACE, "get", "fmj", outcome.job)
    console.print(row.rstrip(), soft_wrap=True)
    note(f"look around: KUBECONFIG={tools.kubeconfig} {tools.kubectl_path} -n {NAMESPACE} describe fmj {outcome.job}")
    note("remove everything: make cluster-down")


def _with_image(path: Path, image: str) -> list[dict[str, Any]]:
    """The manifests of an example with the image that this run uses."""
    manifests: list[dict[str, Any]] = [manifest for manifest in yaml.safe_load_all(path.read_text()) if manifest]
    for manifest in manifests:
        if manifest["kind"] == "ForeMoEJob":
            manifest["spec"]["image"] = image
        for container in manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            container["image"] = image
    return manifests


def _poll(what: str, probe: Callable[[], T], *, seconds: float) -> T:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = probe()
        if answer:
            return answer
        time.sleep(POLL_SECONDS)
    raise ClusterError(f"{what}: no end after {seconds:.0f} s")
