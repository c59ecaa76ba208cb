"""Reads one tool call from the text between two tags, and names its errors.

Owns the arguments of all formats: JSON, or texts with types from the tool's schema. Owns no tags.

The rule for a text without a type:

1. if its schema allows only strings, the text is the value;
2. else, if the text is JSON (or `True`, `False`, `None`) of a type that the schema allows, or the
   schema has no types, that is the value; but quotes do not make a string;
3. else the text is the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from forge.core.formats.base import CallDelta, Tools
from forge.core.strict_json import DECODER

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_ALL_TYPES = {"null", "boolean", "integer", "number", "array", "object"}
_ESCAPED = re.compile(r"\\.", re.DOTALL)


class MalformedCall(Exception):
    """A call that does not parse; the text has the reason."""


def call_of(name: object, arguments: object, *, call_id: str = "") -> CallDelta:
    """A call, if these are a name and an object of arguments; raises `MalformedCall`."""
    if not isinstance(name, str) or not name.strip() or not _encodable(name):
        raise MalformedCall("a tool call without a name")
    name = name.strip()
    if not isinstance(arguments, dict):
        raise MalformedCall(f"a call of {name[:60]} without an object of arguments")
    try:
        return CallDelta(name=name, arguments=spelt(arguments), call_id=call_id)
    except RecursionError:
        raise MalformedCall(
            f"a call of {name[:60]} whose arguments are nested too deeply"
        ) from None


def spelt(value: object) -> str:
    """JSON text that can be encoded: models do write "\\ud83d" and stop."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _encodable(text) else json.dumps(value)


def read_json(text: str) -> Any:
    """A JSON value; raises `MalformedCall`, also for numbers that JSON cannot write."""
    value, end = read_json_at(text, 0)
    if text[end:].strip():
        raise MalformedCall("a tool call with something behind its JSON")
    return value


def read_json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at `at`, white space aside, and where it ends."""
    start = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"a tool call that is not JSON: {error}"[:200]) from None


def outside_strings(text: str) -> bool:
    """Whether JSON as far as `text` ends outside of a string: only there a tag can be one."""
    return _ESCAPED.sub("", text).count('"') % 2 == 0


def typed_arguments(pairs: Iterable[tuple[str, str]], *, tool: str, tools: Tools) -> dict[str, Any]:
    """Return the arguments of texts, by the rule above. Raises `MalformedCall` for a repeat."""
    properties = _properties(tools, tool)
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        if key in arguments:
            raise MalformedCall(f"a call of {tool[:60]} that gives {key[:60]} twice")
        arguments[key] = typed(text, properties.get(key))
    return arguments


def typed(text: str, schema: object) -> Any:
    """Return the value of `text` for a parameter with `schema`."""
    types = _types(schema)
    if types == {"string"}:
        return text
    word = text.strip()
    if word in _PYTHON_WORDS:
        value: Any = _PYTHON_WORDS[word]
    else:
        try:
            value = read_json(text)
        except MalformedCall:
            return text
    if isinstance(value, str):
        return text
    return value if not types or types & _types_of(value) else text


def read_as(schema: object) -> set[str]:
    """Return the types besides strings that a text may have for a parameter with `schema`."""
    return (_types(schema) or _ALL_TYPES) - {"string"}


def untyped(value: Any) -> str:
    """Return the text that `typed` reads as `value`: a string unchanged, other values as JSON."""
    return value if isinstance(value, str) else spelt(value)


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def _types(schema: object) -> set[str]:
    """Return the JSON types that a schema allows; empty if it has none."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {kind for kind in declared if isinstance(kind, str)}
    if isinstance(schema.get("enum"), list):
        return {kind for value in schema["enum"] for kind in _types_of(value)}
    choices = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(choices, list) or not all(_types(choice) for choice in choices):
        return set()
    return {kind for choice in choices for kind in _types(choice)}


def _types_of(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case str():
            return {"string"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _encodable(text: str) -> bool:
    """False for half surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
