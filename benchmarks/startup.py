"""How long a job needs from `kubectl apply` to its first finished RL step, phase by phase, and what its pods cost.

Needs a cluster with the operator, the worker image on its nodes, and the example's volume filled
(`kubectl apply -f examples/prepare-tiny-moe.yaml`). Uses `kubectl` of the PATH and its current context.

    python benchmarks/startup.py --namespace default --repeat 3

Prints for each run the seconds from apply to: all pods created (the operator's part), all pods running, all ranks
joined, driver started, first step done. Times of the API server (creation stamps of whole seconds) are not used for
phases below a second: the client watches the pods itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo-tiny-moe.yaml"
PHASES = ("all pods created", "all pods running", "all ranks joined", "driver started", "first step done")
_POLL_SECONDS = 0.1


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    """Output of kubectl; the run ends with its error text if it fails."""
    done = subprocess.run(["kubectl", *arguments], input=stdin, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Run:
    """One job, from apply to its first step."""

    namespace: str
    job: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.job["metadata"]["name"])

    def measure(self, limit_seconds: float) -> dict[str, float]:
        """Apply the job, note when each phase ends, delete it."""
        kubectl("-n", self.namespace, "apply", "-f", "-", stdin=json.dumps(self.job))
        begun, applied = time.monotonic(), datetime.now(UTC)
        try:
            while PHASES[-1] not in self.seconds:
                elapsed = time.monotonic() - begun
                if elapsed > limit_seconds:
                    raise SystemExit(f"{self.name}: no first step after {elapsed:.0f} s; see kubectl describe fmj")
                self._look(elapsed, applied)
                time.sleep(_POLL_SECONDS)
        finally:
            kubectl("-n", self.namespace, "delete", "fmj", self.name, "--wait=true")
        return self.seconds

    def _look(self, elapsed: float, applied: datetime) -> None:
        if "all pods running" not in self.seconds:
            self._look_at_pods(elapsed)
        status = json.loads(kubectl("-n", self.namespace, "get", "fmj", self.name, "-o", "json")).get("status", {})
        if _is_true(status, "Failed"):
            raise SystemExit(f"{self.name} failed: {json.dumps(status.get('lastFailure'))}")
        if _is_true(status, "Ready"):
            self.seconds.setdefault("all ranks joined", elapsed)
        progress = status.get("progress", {})
        # The agent stamps these itself; the operator's view of them is up to its polling interval late.
        for phase, key in (("driver started", "startedTime"), ("first step done", "firstStepTime")):
            if key in progress:
                moment = datetime.fromisoformat(progress[key].replace("Z", "+00:00"))
                self.seconds.setdefault(phase, (moment - applied).total_seconds())

    def _look_at_pods(self, elapsed: float) -> None:
        text = kubectl("-n", self.namespace, "get", "pods", "-l", f"foremoe.io/job={self.name}", "-o", "json")
        pods = json.loads(text)["items"]
        if len(pods) == self.job["spec"]["workers"]["replicas"] + 1:
            self.seconds.setdefault("all pods created", elapsed)
            if all(pod["status"].get("phase") == "Running" for pod in pods):
                self.seconds.setdefault("all pods running", elapsed)


def _is_true(status: dict[str, Any], kind: str) -> bool:
    conditions = status.get("conditions", [])
    return any(entry["type"] == kind and entry["status"] == "True" for entry in conditions)


def table(runs: list[dict[str, float]], show: Callable[[str], None]) -> None:
    """Least, median and largest seconds of every phase."""
    for phase in PHASES:
        values = [run[phase] for run in runs if phase in run]
        if values:
            median = statistics.median(values)
            show(f"{phase:<18} min {min(values):6.1f} s   median {median:6.1f} s   max {max(values):6.1f} s")


def main(
    namespace: Annotated[str, typer.Option(help="Namespace that holds the example's claim.")] = "default",
    repeat: Annotated[int, typer.Option(help="Jobs to start, one after the other.")] = 3,
    limit_seconds: Annotated[float, typer.Option(help="Give up on a job after this.")] = 600.0,
    manifest: Annotated[Path, typer.Option(help="The job.")] = EXAMPLE,
) -> None:
    """Measure how long jobs need to start."""
    job = yaml.safe_load(manifest.read_text())
    runs = []
    for number in range(repeat):
        job["metadata"]["name"] = f"startup-{number}"
        seconds = Run(namespace, json.loads(json.dumps(job))).measure(limit_seconds)
        runs.append(seconds)
        typer.echo(", ".join(f"{phase} {seconds[phase]:.1f} s" for phase in PHASES if phase in seconds))
    table(runs, typer.echo)


if __name__ == "__main__":
    typer.run(main)
