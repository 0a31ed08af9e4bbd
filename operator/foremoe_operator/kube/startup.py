"""Checks before the operator starts: that the cluster serves the custom resource with every field this version writes.

An older CRD would make the API server drop new status fields without a word. Helm leaves old CRDs in place in several
ways, so the operator looks for itself and says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from foremoe_operator.api.constants import GROUP, PLURAL_JOB, VERSION
from foremoe_operator.api.schema import job_schema
from foremoe_operator.kube.client import Call, KubeClient, KubeError

_PATH: Final = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL_JOB}.{GROUP}"
_REMEDY: Final = "apply the crds/ of this version, or upgrade the chart with crds.install=true"


def crd_problem(client: KubeClient) -> str | None:
    """What is wrong with the installed CRD, None if nothing is. Raises KubeError if it cannot be read."""
    try:
        crd = client.request_blocking(Call(method="GET", path=_PATH))
    except KubeError as error:
        if error.code == 404:
            return f"the cluster has no {PLURAL_JOB}.{GROUP}: {_REMEDY}"
        raise
    missing = missing_fields(crd)
    return f"the installed CRD lacks {', '.join(missing[:5])}: {_REMEDY}" if missing else None


def missing_fields(crd: Mapping[str, object]) -> list[str]:
    """Paths of fields of our schema that the CRD does not have."""
    spec = crd.get("spec")
    versions = spec.get("versions") if isinstance(spec, Mapping) else None
    for version in versions if isinstance(versions, list) else []:
        if isinstance(version, Mapping) and version.get("name") == VERSION and version.get("served"):
            schema = version.get("schema")
            served = schema.get("openAPIV3Schema") if isinstance(schema, Mapping) else None
            have = set(_paths(served, ""))
            return [path for path in _paths(job_schema(), "") if path not in have]
    return [f"version {VERSION}"]


def _paths(schema: object, path: str) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        return
    properties = schema.get("properties")
    for name, child in properties.items() if isinstance(properties, Mapping) else ():
        yield f"{path}{name}"
        yield from _paths(child, f"{path}{name}.")
    yield from _paths(schema.get("items"), path)
