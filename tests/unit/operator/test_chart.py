"""The chart, rendered by helm where there is one: rights, pod security, and refused values."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from foremoe_cluster import programs

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/foremoe"


def _helm() -> str | None:
    # Whatever set of programs is there: nothing is fetched or built for these tests.
    built = sorted(map(str, (programs.cache() / "cluster").glob("*/bin/helm")))
    return built[0] if built else shutil.which("helm")


pytestmark = pytest.mark.skipif(_helm() is None, reason="no helm: `python -m foremoe_cluster build` makes one")


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(_helm()), *words], capture_output=True, text=True, timeout=60, check=False)


def rendered(*words: str) -> list[dict[str, Any]]:
    result = helm("template", "demo", str(CHART), "-n", "foremoe-system", *words)
    assert result.returncode == 0, result.stderr
    return [each for each in yaml.safe_load_all(result.stdout) if each]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def test_lint_is_clean() -> None:
    result = helm("lint", "--strict", str(CHART))
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_crd_is_installed_unless_told_otherwise_and_outlives_the_release() -> None:
    (crd,) = of_kind(rendered(), "CustomResourceDefinition")
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert crd["spec"] == yaml.safe_load((ROOT / "crds/foremoejobs.foremoe.io.yaml").read_text())["spec"]
    assert not of_kind(rendered("--set", "crds.install=false"), "CustomResourceDefinition")


@pytest.mark.parametrize("words", [(), ("--set", "watchNamespaces={a,b}")])
def test_rights_are_the_least_that_works(words: tuple[str, ...]) -> None:
    objects = rendered(*words)
    roles = [each for each in objects if each["kind"] in ("ClusterRole", "Role")]
    operator = [each for each in roles if not each["metadata"]["name"].endswith(("-edit", "-view"))]
    for rule in (rule for role in operator for rule in role["rules"]):
        for values in (rule["apiGroups"], rule["resources"], rule["verbs"]):
            assert "*" not in values
        assert not {"secrets", "pods/exec", "nodes", "serviceaccounts"} & set(rule["resources"])
        if "foremoejobs" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "list", "watch"}, "the operator never writes a spec"
    if words:
        assert {each["metadata"]["namespace"] for each in of_kind(objects, "Role")} == {"a", "b"}
        (cluster,) = [each for each in operator if each["kind"] == "ClusterRole"]
        assert [rule["resources"] for rule in cluster["rules"]] == [["customresourcedefinitions"]]


def test_the_operators_pod_passes_the_restricted_level() -> None:
    (deployment,) = of_kind(rendered(), "Deployment")
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert container["livenessProbe"] and container["readinessProbe"]


def test_every_setting_of_the_chart_is_one_of_the_operator() -> None:
    from foremoe_operator.settings import PREFIX, Settings

    (deployment,) = of_kind(rendered(), "Deployment")
    environment = {
        each["name"]: each["value"] for each in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    assert Settings.from_environment(ours) == Settings(), "the chart's defaults are the operator's"
    known = {PREFIX + name.upper() for name in vars(Settings())}
    assert ours.keys() <= known


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "image.tga=x"),
        ("--set", "operator.workers=0"),
        ("--set", "operator.logLevel=LOUD"),
        ("--set", "watchNamespaces=default"),
        ("--set", "crds.install=maybe"),
        ("--set", "serviceAccount.create=false"),
    ],
)
def test_bad_values_are_refused_and_named(words: tuple[str, ...]) -> None:
    result = helm("template", "demo", str(CHART), *words)
    assert result.returncode != 0
    last = words[1].split("=")[0].split(".")[-1]
    assert last in result.stderr or "serviceAccount" in result.stderr


def test_the_notes_say_what_to_do_next() -> None:
    result = helm("install", "demo", str(CHART), "--dry-run=client", "-n", "x")
    assert "kubectl get fmj" in result.stdout and "kubectl delete crd" in result.stdout, result.stderr
