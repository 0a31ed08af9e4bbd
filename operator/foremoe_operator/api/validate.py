"""The CRD's checks where there is no API server: `foremoe run JOB.yaml`, and the operator's own second look.

Structure and bounds are pydantic's work. The cross-field rules are not written twice: the CEL text of the generated
schema is evaluated here, over the spec with its defaults filled in, as the API server would do. Rules about changes
(`oldSelf`) have no meaning for a file and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import cel
from pydantic import JsonValue, ValidationError

from foremoe_operator.api.constants import API_VERSION, KIND_JOB
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.schema import JsonObject, job_schema

_ROOT_FIELDS: Final = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})


def problems(manifest: Mapping[str, object]) -> list[str]:
    """What is wrong with a ForeMoEJob manifest, one line each, starting with the field; empty if it is valid."""
    found = list(_identity_problems(manifest))
    spec = manifest.get("spec")
    if not isinstance(spec, Mapping):
        return [*found, "spec: missing: it says what to run"]
    try:
        parsed = ForeMoEJobSpec.model_validate(_without_nulls(spec))
    except ValidationError as error:
        return [*found, *_structure_problems(error)]
    metadata = manifest.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str):
        return [*found, *_broken_rules(job_schema(), {"spec": parsed.dump()}, "", root=False)]
    return [*found, *_broken_rules(job_schema(), {"metadata": {"name": name}, "spec": parsed.dump()}, "")]


def _identity_problems(manifest: Mapping[str, object]) -> Iterator[str]:
    if manifest.get("apiVersion") != API_VERSION:
        yield f"apiVersion: must be {API_VERSION}, not {manifest.get('apiVersion')!r}"
    if manifest.get("kind") != KIND_JOB:
        yield f"kind: must be {KIND_JOB}, not {manifest.get('kind')!r}"
    metadata = manifest.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        yield "metadata.name: missing: the job needs a name"
    yield from (f"{key}: unknown field" for key in manifest if key not in _ROOT_FIELDS)


def _without_nulls(value: object) -> object:
    """An explicit null means "not set", as the API server takes it."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _structure_problems(error: ValidationError) -> Iterator[str]:
    for each in error.errors(include_url=False):
        path = "spec"
        for part in each["loc"]:
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
        message = "unknown field" if each["type"] == "extra_forbidden" else each["msg"]
        yield f"{path}: {message}"


def _broken_rules(schema: JsonValue, value: JsonValue | object, path: str, *, root: bool = True) -> Iterator[str]:
    """Walks schema and value together and evaluates what is attached to each node, outermost first."""
    if not isinstance(schema, dict):
        return
    if root:
        yield from _own_rules(schema, value, path)
    yield from _duplicates(schema, value, path)
    properties, items = schema.get("properties"), schema.get("items")
    if isinstance(properties, dict) and isinstance(value, dict):
        for name, child in properties.items():
            if name in value:
                yield from _broken_rules(child, value[name], f"{path}.{name}".lstrip("."))
    if isinstance(items, dict) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(items, item, f"{path}[{index}]")


def _own_rules(schema: JsonObject, value: object, path: str) -> Iterator[str]:
    rules = schema.get("x-kubernetes-validations", [])
    for rule in rules if isinstance(rules, list) else []:
        assert isinstance(rule, dict)
        expression = str(rule["rule"])
        if "oldSelf" not in expression and not cel.evaluate(expression, {"self": value}):
            yield f"{path}{rule.get('fieldPath', '')}: {rule['message']}".lstrip(": .")


def _duplicates(schema: JsonObject, value: object, path: str) -> Iterator[str]:
    """A list of type map must not hold two items with the same key; the API server checks this by itself."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if not isinstance(keys, list) or not isinstance(value, list):
        return
    seen: set[tuple[object, ...]] = set()
    for index, item in enumerate(value):
        key = tuple(item.get(str(name)) for name in keys)
        if key in seen:
            yield f"{path}[{index}]: a second item with the same {', '.join(map(str, keys))}: {key[0]}"
        seen.add(key)
