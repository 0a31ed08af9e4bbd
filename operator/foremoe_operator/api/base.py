"""What all models of the custom resources share: camelCase names outside, snake_case inside, nothing unknown.

Cross-field rules are CEL and sit on the models as `x-kubernetes-validations`. They go into the CRD unchanged, where the
API server runs them, and `foremoe_operator.api.validate` runs the very same text where there is no API server.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, PlainSerializer
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Base of every model that is written as JSON or YAML: frozen, camelCase, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def dump(self) -> dict[str, object]:
        """As a JSON-ready dict with the outside names, unset optional fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class LenientModel(ApiModel):
    """A model read back from an API server that may be newer than this program: unknown fields are dropped."""

    model_config = ConfigDict(extra="ignore")


def rule(expression: str, message: str, *, field: str | None = None, reason: str = "FieldValueInvalid") -> JsonValue:
    """One CEL rule of the CRD. `message` names the field from `spec` on; `field` is its path relative to the rule.

    Only functions of the CEL standard are used, so that any CEL runtime can evaluate it.
    """
    entry: dict[str, JsonValue] = {"rule": expression, "message": message, "reason": reason}
    return {**entry, "fieldPath": field} if field else entry


def rules(*entries: JsonValue) -> dict[str, JsonValue]:
    """Schema extra that carries CEL rules; goes to `json_schema_extra` of a model or a field."""
    return {"x-kubernetes-validations": list(entries)}


def map_list(key: str) -> dict[str, JsonValue]:
    """Schema extra of a list whose items are told apart by `key`: server-side apply merges by it, duplicates fail."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


def to_rfc3339(value: datetime) -> str:
    """A time as Kubernetes writes it: UTC, whole seconds, `Z`."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _whole_seconds(value: object) -> object:
    return value.replace(microsecond=0) if isinstance(value, datetime) else value


# Truncated when set, not only when written, so that a status compares equal with itself read back.
Timestamp = Annotated[datetime, BeforeValidator(_whole_seconds), PlainSerializer(to_rfc3339, when_used="json")]
