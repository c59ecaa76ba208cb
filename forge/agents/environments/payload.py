"""Reading a task's payload: a missing or ill-typed key is told by name.

Owns the check alone; which keys there are is each domain's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from forge.core.errors import InvalidArgument

T = TypeVar("T")


def required(payload: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """The payload's value under `key`. Raises `InvalidArgument` unless it is a `kind`."""
    if key not in payload:
        raise InvalidArgument(f"payload lacks {key!r} (a {kind.__name__})")
    value = payload[key]
    if not isinstance(value, kind):
        raise InvalidArgument(f"payload {key!r} must be a {kind.__name__}, is {value!r}")
    return value
