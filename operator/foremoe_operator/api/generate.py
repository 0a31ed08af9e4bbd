"""Writes what is derived from the models: the CRD, the chart's copy of it, and the reference page.

`python -m foremoe_operator.api.generate` rewrites the files, `--check` only says which are out of date (exit code 1).
Nothing here is edited by hand afterwards; a unit test keeps files and models in step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml
from pydantic import JsonValue

from foremoe_operator.api.constants import CATEGORY, GROUP, KIND_JOB, PLURAL_JOB, SHORT_JOB, VERSION
from foremoe_operator.api.schema import JsonObject, job_schema

CRD_NAME: Final = f"{PLURAL_JOB}.{GROUP}"
ROOT: Final = Path(__file__).resolve().parents[3]
_COLUMNS: Final = (
    ("Phase", "string", ".status.phase", "Summary of the conditions.", 0),
    ("Ready", "integer", ".status.workers.ready", "Worker pods that are ready.", 0),
    ("Desired", "integer", ".spec.workers.replicas", "Worker pods asked for.", 0),
    ("Step", "integer", ".status.progress.step", "RL steps finished.", 0),
    ("Steps", "integer", ".spec.totalSteps", "RL steps asked for.", 0),
    ("Reward", "string", ".status.progress.reward", "Mean reward of the last step.", 0),
    ("Balance", "string", ".status.progress.balance.mean", "Max over mean rank load; 1.0 is perfect.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Time since the job was created.", 0),
    ("Stage", "string", ".status.progress.stage", "What the head is doing.", 1),
    ("Checkpoint", "integer", ".status.checkpoint.latestStep", "Step of the newest checkpoint.", 1),
    ("Failure", "string", ".status.lastFailure.reason", "Why the job failed.", 1),
)


def _column(name: str, kind: str, path: str, description: str, priority: int) -> JsonObject:
    column: JsonObject = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": priority} if priority else column


def job_crd() -> JsonObject:
    """The CustomResourceDefinition of ForeMoEJob."""
    version: JsonObject = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(*column) for column in _COLUMNS],
        "schema": {"openAPIV3Schema": job_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME, "labels": {"app.kubernetes.io/part-of": "foremoe"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND_JOB,
                "listKind": f"{KIND_JOB}List",
                "plural": PLURAL_JOB,
                "singular": KIND_JOB.lower(),
                "shortNames": [SHORT_JOB],
                "categories": [CATEGORY],
            },
            "versions": [version],
        },
    }


def _chart_copy(crd: JsonObject) -> str:
    metadata = crd["metadata"]
    assert isinstance(metadata, dict)
    kept: JsonObject = {**crd, "metadata": {**metadata, "annotations": {"helm.sh/resource-policy": "keep"}}}
    return "{{- if .Values.crds.install }}\n" + _yaml(kept) + "{{- end }}\n"


def _yaml(document: JsonObject) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True))


def _kind_of(schema: JsonObject) -> str:
    items = schema.get("items", schema.get("additionalProperties"))
    inner = f" of {_kind_of(items)}" if isinstance(items, dict) else ""
    name = "map" if "additionalProperties" in schema else str(schema.get("type"))
    if isinstance(values := schema.get("enum"), list):
        return " \\| ".join(str(value) for value in values)
    return name + inner


def _bounds(schema: JsonObject) -> str:
    words = {
        "minimum": "≥ {}", "maximum": "≤ {}", "minItems": "at least {} items", "maxItems": "at most {} items",
        "maxLength": "at most {} characters", "maxProperties": "at most {} entries",
    }  # fmt: skip
    return ", ".join(text.format(schema[key]) for key, text in words.items() if key in schema)


def _rows(schema: JsonObject, path: str) -> Iterator[str]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return
    required = schema.get("required")
    for name, child in properties.items():
        assert isinstance(child, dict)
        need = "yes" if isinstance(required, list) and name in required else ""
        default = f"`{json.dumps(child['default'])}`" if "default" in child else ""
        text = str(child.get("description", "")).replace("|", "\\|")
        yield f"| `{path}{name}` | {_kind_of(child)} | {need} | {default} | {_bounds(child)} | {text} |"
        items = child.get("items")
        yield from _rows(child, f"{path}{name}.")
        if isinstance(items, dict):
            yield from _rows(items, f"{path}{name}[].")


def _rule_lines(schema: JsonValue) -> Iterator[str]:
    if isinstance(schema, dict):
        entries = schema.get("x-kubernetes-validations", [])
        assert isinstance(entries, list)
        yield from (f"- {entry['message']}" for entry in entries if isinstance(entry, dict))
        for key in ("properties", "items"):
            child = schema.get(key)
            for each in child.values() if isinstance(child, dict) and key == "properties" else [child]:
                yield from _rule_lines(each)


def reference_page() -> str:
    """The generated part of the documentation: every field, bound and rule."""
    properties = job_schema()["properties"]
    assert isinstance(properties, dict)
    parts = ["# ForeMoEJob reference", "", "Generated by `python -m foremoe_operator.api.generate`; do not edit.", ""]
    table = ["| field | type | required | default | bounds | meaning |", "|---|---|---|---|---|---|"]
    for section in ("spec", "status"):
        node = properties[section]
        assert isinstance(node, dict)
        parts += [f"## {section}", "", str(node["description"]), "", *table, *_rows(node, f"{section}."), ""]
    parts += ["## Rules", "", "Checked by the API server, and by `foremoe run`.", ""]
    return "\n".join([*parts, *dict.fromkeys(_rule_lines(job_schema())), ""])


def outputs() -> dict[Path, str]:
    """Every generated file, relative to the repository's root, with its content."""
    crd = job_crd()
    return {
        Path(f"crds/{CRD_NAME}.yaml"): _yaml(crd),
        Path(f"charts/foremoe/templates/crds/{CRD_NAME}.yaml"): _chart_copy(crd),
        Path("docs/crd-reference.md"): reference_page(),
    }


def stale(root: Path = ROOT) -> list[Path]:
    """Generated files that differ from what the models say."""
    return [
        path for path, text in outputs().items() if not (root / path).is_file() or (root / path).read_text() != text
    ]


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    old = stale()
    for path in old:
        if "--check" not in arguments:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(outputs()[path])
        print(f"{'out of date' if '--check' in arguments else 'written'}: {path}")
    return 1 if old and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
