"""The arguments of tool calls, for protocols that send them as JSON objects."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec


def input_json(arguments: str) -> str:
    """Returns the arguments of a call as JSON that every client can parse.

    NaN and half surrogates, which only Python parses, are replaced. An agent that sends the
    replacement back makes a branch.
    """
    try:
        try:
            msgspec.json.decode(arguments)
        except (msgspec.MsgspecError, UnicodeError):
            return json.dumps(_readable(json.loads(arguments)), ensure_ascii=False)
    except RecursionError:
        pass
    return arguments


def _readable(value: Any) -> Any:
    match value:
        case dict():
            return {_readable(key): _readable(below) for key, below in value.items()}
        case list():
            return [_readable(below) for below in value]
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case float() if not math.isfinite(value):
            return None
        case _:
            return value
