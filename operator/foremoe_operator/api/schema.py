"""From pydantic models to the structural OpenAPI schema that a CustomResourceDefinition holds.

pydantic writes JSON Schema 2020; Kubernetes takes a narrower form. References are inlined, an optional field is simply
not required (an explicit null is then pruned by the API server before CEL sees it, which `nullable` would not do), and
unknown fields are left to the API server's own strict check.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from pydantic import JsonValue
from pydantic.json_schema import GenerateJsonSchema, NoDefault
from pydantic_core import core_schema

from foremoe_operator.api.base import ApiModel
from foremoe_operator.api.constants import API_VERSION, JOB_NAME_MAX_LENGTH, KIND_JOB
from foremoe_operator.api.job import ForeMoEJobSpec
from foremoe_operator.api.status import ForeMoEJobStatus

JsonObject = dict[str, JsonValue]
_DROPPED: Final = frozenset({"title", "$defs", "const"})
_NAME_RULES: Final[list[JsonValue]] = [
    {
        "rule": f"size(self.metadata.name) <= {JOB_NAME_MAX_LENGTH}",
        "message": f"metadata.name must have at most {JOB_NAME_MAX_LENGTH} characters, because the names of pods and "
        "service append to it",
        "reason": "FieldValueInvalid",
    },
    {
        "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "message": "metadata.name must be an RFC 1035 label: lower-case letters, digits and '-', a letter first, "
        "no dots, because pods and service take their host names from it",
        "reason": "FieldValueInvalid",
    },
]


class _WithFactories(GenerateJsonSchema):
    """Also writes the defaults that come from a default_factory, unless they are empty objects."""

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> object:
        factory = schema.get("default_factory")
        if factory is None or schema.get("default_factory_takes_data"):
            return super().get_default_value(schema)
        value = factory()  # type: ignore[call-arg]  # the variant without data, checked above
        if isinstance(value, ApiModel):
            value = {key: item for key, item in value.dump().items() if item not in ({}, [])}
        return NoDefault if value == {} else value


def _merge(base: JsonObject, over: JsonObject) -> JsonObject:
    """`over` wins, but rules add up."""
    merged = {**base, **over}
    rules = [*_list(base, "x-kubernetes-validations"), *_list(over, "x-kubernetes-validations")]
    if rules:
        merged["x-kubernetes-validations"] = rules
    return merged


def _list(node: JsonObject, key: str) -> list[JsonValue]:
    found = node.get(key, [])
    return found if isinstance(found, list) else []


def _structural(node: JsonValue, definitions: JsonObject) -> JsonValue:
    if isinstance(node, list):
        return [_structural(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: value for key, value in node.items() if key not in _DROPPED}
    if isinstance(reference := node.pop("$ref", None), str):
        target = definitions[reference.removeprefix("#/$defs/")]
        assert isinstance(target, dict)
        return _structural(_merge(target, node), definitions)
    if "anyOf" in node:
        (kind,) = (each for each in _list(node, "anyOf") if each != {"type": "null"})
        assert isinstance(kind, dict)
        node = _merge(kind, {key: value for key, value in node.items() if key not in ("anyOf", "default")})
        return _structural(node, definitions)
    if node.get("additionalProperties") is False:
        del node["additionalProperties"]
    return {
        key: {name: _structural(item, definitions) for name, item in value.items()}
        if key == "properties" and isinstance(value, dict)
        else value
        if key in ("default", "x-kubernetes-validations")
        else _structural(value, definitions)
        for key, value in node.items()
    }


def _of_model(model: type[ApiModel]) -> JsonObject:
    raw = model.model_json_schema(by_alias=True, schema_generator=_WithFactories)
    definitions = raw.get("$defs", {})
    schema = _structural(raw, definitions)
    assert isinstance(schema, dict)
    return schema


def _open_words(node: JsonValue) -> JsonValue:
    """A status may hold words that a later version adds; an enum would refuse them, and with them the whole status."""
    if isinstance(node, list):
        return [_open_words(item) for item in node]
    if not isinstance(node, dict):
        return node
    plain = {key: _open_words(value) for key, value in node.items() if key != "enum"}
    return plain if "enum" not in node else {**plain, "maxLength": 64}


@cache
def job_schema() -> JsonObject:
    """The `openAPIV3Schema` of ForeMoEJob."""
    return {
        "type": "object",
        "description": "One RL post-training run of a Mixture-of-Experts model: veRL on a Ray cluster of its own.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"Version of this schema: {API_VERSION}."},
            "kind": {"type": "string", "description": f"{KIND_JOB}."},
            "metadata": {"type": "object"},
            "spec": _of_model(ForeMoEJobSpec),
            "status": _open_words(_of_model(ForeMoEJobStatus)),
        },
        "x-kubernetes-validations": _NAME_RULES,
    }
