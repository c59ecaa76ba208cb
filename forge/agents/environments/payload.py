"""Checked access to a task's payload.

Owns the check of one key; each domain owns its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from forge.core.errors import InvalidArgument

T = TypeVar("T")

_NAMES: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "an array",
    dict: "an object",
}
"""Names of the types in JSON."""


def required(payload: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """Returns the value of `key`. Raises `InvalidArgument` for a missing key or another type."""
    if key not in payload:
        raise InvalidArgument(f"payload lacks {key!r} ({_NAMES[kind]})")
    value = payload[key]
    if not isinstance(value, kind):
        raise InvalidArgument(f"payload {key!r} must be {_NAMES[kind]}, is {value!r:.80}")
    return value
