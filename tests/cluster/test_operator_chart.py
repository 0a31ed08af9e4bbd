"""The chart on a real cluster: its pod starts under the restricted level, with the rights the chart gives it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from foremoe_cluster.errors import ClusterError
from foremoe_cluster.kubectl import Tools
from tests.cluster.conftest import IMAGE, Namespace, errors_in, wait_for

pytestmark = pytest.mark.cluster
CHART = Path(__file__).parents[2] / "charts/foremoe"
MEGABYTE = 1 << 20


@pytest.fixture
def release(tools: Tools, namespace: Namespace) -> Iterator[str]:
    """The chart, serving only a namespace of its own so that it meets no other operator."""
    name = f"chart-{uuid.uuid4().hex[:6]}"
    repository, _, tag = IMAGE.rpartition(":")
    tools.helm(
        "install", name, str(CHART), "-n", namespace.name, "--wait", "--timeout", "2m",
        "--set", f"image.repository={repository}", "--set", f"image.tag={tag}",
        "--set", "crds.install=false", "--set", f"watchNamespaces={{{namespace.name}}}",
    )  # fmt: skip
    yield name
    tools.helm("uninstall", name, "-n", namespace.name)


def test_the_installed_operator_is_healthy_small_and_allowed_to_do_its_work(
    tools: Tools, namespace: Namespace, release: str
) -> None:
    tools.helm("test", release, "-n", namespace.name)
    deployment = f"deployment/{release}-foremoe"
    log = namespace.kubectl("logs", deployment)
    assert not (errors := errors_in(log)), errors
    program = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/healthz').read().decode())"
    health = namespace.kubectl("exec", deployment, "--", "python", "-c", program)
    assert "seconds-since-last-event" in json.loads(health)
    status = namespace.kubectl("exec", deployment, "--", "cat", "/proc/1/status")
    resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident < 150 * MEGABYTE, f"{resident / MEGABYTE:.0f} MB"


def test_people_with_the_edit_role_may_use_jobs(tools: Tools, namespace: Namespace, release: str) -> None:
    who = ("--as=someone", f"--as-group={namespace.name}-editors")
    binding = ("create", "rolebinding", "editors", "--clusterrole=edit", f"--group={namespace.name}-editors")
    namespace.kubectl(*binding)

    def may(verb: str, *what: str) -> bool:
        try:
            return namespace.kubectl("auth", "can-i", verb, *what, *who).strip() == "yes"
        except ClusterError:  # kubectl's exit code 1 means no
            return False

    wait_for("the aggregated right", lambda: may("create", "foremoejobs.foremoe.io"), seconds=20)
    assert may("delete", "foremoejobs.foremoe.io")
    assert not may("update", "foremoejobs.foremoe.io", "--subresource=status"), "the status is the operator's alone"
