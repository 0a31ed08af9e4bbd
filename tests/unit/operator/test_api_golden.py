"""What other programs, dashboards and running jobs rely on: a change here must be meant."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.operator.builders import manifest

from foremoe_operator.api import constants as c
from foremoe_operator.api import generate
from foremoe_operator.api.boot import BootConfig
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.schema import job_schema

GOLDEN = Path(__file__).parent / "golden_api.json"


def _api() -> dict[str, object]:
    enums = (c.Role, c.Stage, c.Phase, c.ConditionType, c.Reason, c.EventReason)
    names = {
        name: value
        for name, value in vars(c).items()
        if name.isupper() and isinstance(value, str | int | tuple) and not isinstance(value, bool)
    }
    return {
        "constants": {
            name: list(value) if isinstance(value, tuple) else value for name, value in sorted(names.items())
        },
        "enums": {enum.__name__: [str(each) for each in enum] for enum in enums},
        "exitCodes": {each.name: int(each) for each in c.ExitCode},
        "ownedOverrides": sorted(c.OWNED_OVERRIDES),
        "fields": sorted(_paths(job_schema(), "")),
    }


def _paths(schema: object, path: str) -> list[str]:
    if not isinstance(schema, dict):
        return []
    found = [*_paths(schema.get("items"), path + "[]")] if "items" in schema else []
    for name, child in schema.get("properties", {}).items():
        found += [f"{path}.{name}".lstrip("."), *_paths(child, f"{path}.{name}".lstrip("."))]
    return found


def test_the_api_is_what_it_was() -> None:
    api = json.dumps(_api(), indent=1) + "\n"
    assert api == GOLDEN.read_text(), f"if the change is meant, write it to {GOLDEN}:\n{api}"


def test_generated_files_are_in_step_with_the_models() -> None:
    assert generate.stale() == [], "run: python -m foremoe_operator.api.generate"


def test_the_reference_names_every_field_and_rule() -> None:
    page = generate.reference_page()
    assert "`spec.volumes[].mountPath`" in page and "`status.lastFailure.logTail`" in page
    assert "parallelism.expert must divide" in page


def _nodes(schema: dict[str, object], path: str = "") -> list[tuple[str, dict[str, object]]]:
    found = [(path, schema)]
    for key in ("items", "additionalProperties"):
        if isinstance(child := schema.get(key), dict):
            found += _nodes(child, f"{path}[]")
    properties = schema.get("properties", {})
    assert isinstance(properties, dict)
    for name, child in properties.items():
        found += _nodes(child, f"{path}.{name}")
    return found


def test_the_schema_is_structural_bounded_and_explained() -> None:
    for path, node in _nodes(job_schema()):
        assert "$ref" not in node and "anyOf" not in node and "type" in node, path
        spec = path.startswith(".spec.")
        if node["type"] == "array":
            assert "maxItems" in node, path
        if node["type"] == "string" and spec:
            assert "maxLength" in node or "enum" in node, path
        if node["type"] == "object" and "additionalProperties" in node:
            assert "maxProperties" in node, path
        if path and not path.endswith("[]") and path != ".metadata":
            assert node.get("description"), path


def test_the_boot_file_reads_back_as_what_was_applied() -> None:
    spec = ForeMoEJobSpec.model_validate(manifest(env=[{"name": "A", "value": "b"}])["spec"])
    boot = BootConfig(job="tiny", namespace="ns", head_host="tiny-head-0.tiny-ray", spec=spec)
    assert BootConfig.model_validate_json(json.dumps(boot.dump())) == boot
