"""Schemas in the dialect of Gemini's API (OpenAPI 3.0), as JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.core.errors import InvalidArgument

_COUNTS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
"""Whole numbers, which the API also takes as texts."""
_WITHOUT_EFFECT = frozenset({"nullable", "propertyOrdering", "property_ordering", "example"})
MAX_DEPTH = 100


def json_schema(schema: Mapping[str, Any], *, depth: int = 0) -> dict[str, Any]:
    """Returns the JSON Schema: types in lower case, `nullable` as a type, properties in the given
    order. Raises `InvalidArgument` for a schema that is nested too deeply."""
    if depth > MAX_DEPTH:
        raise InvalidArgument("the schema is nested too deeply")
    converted: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name == "type" and isinstance(value, str):
            converted[name] = value.lower()
        elif name == "properties" and isinstance(value, dict):
            converted[name] = _properties(schema, value, depth)
        elif name in ("anyOf", "any_of") and isinstance(value, list):
            converted["anyOf"] = [_below(one, depth) for one in value]
        elif name in ("items", "additionalProperties"):
            converted[name] = _below(value, depth)
        elif name in _COUNTS and isinstance(value, str) and value.isdigit():
            converted[name] = int(value)
        else:
            converted[name] = value
    if converted.get("type") == "type_unspecified":
        del converted["type"]
    return _nullable(converted) if schema.get("nullable") else converted


def _properties(schema: Mapping[str, Any], given: dict[str, Any], depth: int) -> dict[str, Any]:
    order = schema.get("propertyOrdering") or schema.get("property_ordering") or ()
    names = [name for name in order if name in given]
    names += [name for name in given if name not in names]
    return {name: _below(given[name], depth) for name in names}


def _below(value: Any, depth: int) -> Any:
    return json_schema(value, depth=depth + 1) if isinstance(value, dict) else value


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}
