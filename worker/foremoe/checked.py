"""Reading settings from outside: pydantic's many errors become one PlannerError that names the field.

Below every other module but `errors`, so that planner settings and topologies are refused in the same words.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from foremoe.errors import PlannerError

__all__ = ["validated"]

M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], data: object, *, what: str, root: str) -> M:
    """`model` from JSON text or from plain data. Raises PlannerError: `what`, the field (else `root`), the mistake."""
    try:
        if isinstance(data, str | bytes):
            return model.model_validate_json(data)
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or root
        raise PlannerError(f"{what}: {where}: {first['msg']}") from error
