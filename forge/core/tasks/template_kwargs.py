"""Variables of a chat template (`chat_template_kwargs`), as tasks, tokens and requests have them.

Owns their form: a JSON object, in one spelling. Which variables exist is the gateway's knowledge,
which has the template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forge.core.errors import InvalidArgument

MAX_KWARGS_BYTES = 4096


def kwargs_json(kwargs: Mapping[str, Any] | None) -> str:
    """Return the one spelling of variables; "" for none."""
    return json.dumps(kwargs, sort_keys=True, separators=(",", ":")) if kwargs else ""


def checked(kwargs: str, *, field: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return the variables of a task, a domain or a request. Raise `InvalidArgument` with `field`
    for a text that is too large or no JSON object."""
    size_bytes = len(kwargs.encode())
    if size_bytes > MAX_KWARGS_BYTES:
        raise InvalidArgument(f"{field} has {size_bytes} bytes; at most {MAX_KWARGS_BYTES}")
    return merged(kwargs, field=field)


def merged(*layers: str, field: str = "chat_template_kwargs") -> dict[str, Any]:
    """Return the variables of several JSON objects; a later object replaces those of the same name,
    and "" has none. Together they may be larger than each may be. Raises `InvalidArgument` with
    `field` for another text."""
    variables: dict[str, Any] = {}
    for layer in filter(None, layers):
        try:
            read = json.loads(layer)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{field} is not JSON: {error}") from None
        if not isinstance(read, dict):
            raise InvalidArgument(f"{field} must be a JSON object, not {layer[:40]!r}")
        variables |= read
    return variables
