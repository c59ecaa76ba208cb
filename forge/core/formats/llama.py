"""Llama 3's JSON calls; Python lists of calls of Llama 3 and Llama 4.

    llama3_json   {"name": "look", "parameters": {"at": "a"}}
    pythonic      [look(at="a"), look(at="b")]

Several JSON objects may follow one another, with semicolons between. JSON may come after
`<|python_tag|>` anywhere in the answer, a list between `<|python_start|>` and `<|python_end|>`;
without these tags the call is the whole answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from forge.core.formats.base import CallDelta, Parser, Tools
from forge.core.formats.hermes import read_call, write_call
from forge.core.formats.parsers.blocks import Block, BlockParser
from forge.core.formats.parsers.calls import MalformedCall, call_of, outside_strings, read_json_at
from forge.core.formats.parsers.literals import Reader, write_literal
from forge.core.formats.parsers.whole import WholeParser

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
_JSON_ATTEMPT = re.compile(r'\s*{\s*"name"')
_BETWEEN = re.compile(r"[\s;]*")
_CALL_KEYS = {"parameters", "arguments"}
_LIST_ATTEMPT = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")


class LlamaJsonFormat:
    """Llama 3.1, 3.2 and 3.3."""

    name = "llama3_json"
    marks = frozenset({PYTHON_TAG})
    signs: tuple[str, ...] = ('{"name": ', '"parameters": ')
    takes_tools = True

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        tagged = Block(open=PYTHON_TAG, close="", read=_read_objects, complete=outside_strings)
        return WholeParser("{", _read_json_answer, BlockParser(tagged))

    def opening(self, tool: str | None) -> str:
        """Return the text that forces a call of `tool`."""
        return '{"name": "' if tool is None else f'{{"name": {json.dumps(tool)}, "parameters": '

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        return "; ".join(write_call(call, arguments_key="parameters") for call in calls)


class PythonicFormat:
    """Llama 3.2 in small sizes, Llama 4, and others that were trained on ToolACE."""

    name = "pythonic"
    marks = frozenset({PYTHON_START, PYTHON_END})
    signs: tuple[str, ...] = ("[func_name1(",)
    takes_tools = True

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        tagged = Block(
            open=PYTHON_START,
            close=PYTHON_END,
            read=_read_list,
            complete=lambda body: Reader.complete(body),
        )
        return WholeParser("[", _read_list_answer, BlockParser(tagged))

    def opening(self, tool: str | None) -> str:
        """Return the text that forces a call of `tool`."""
        return "[" if tool is None else f"[{tool}("

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        return f"[{', '.join(_write_python(call) for call in calls)}]"


def _read_json_answer(text: str) -> Sequence[CallDelta] | None:
    try:
        values = _read_values(text)
    except MalformedCall:
        if _JSON_ATTEMPT.match(text):
            raise
        return None
    # An object that was asked for may well have a name; with arguments it is a call.
    if not any(isinstance(value, dict) and _CALL_KEYS & value.keys() for value in values):
        return None
    return [read_call(value) for value in values]


def _read_objects(text: str) -> Sequence[CallDelta]:
    calls = [read_call(value) for value in _read_values(text)]
    if not calls:
        raise MalformedCall("the tag of a tool call with nothing behind it")
    return calls


def _read_values(text: str) -> list[Any]:
    values: list[Any] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        value, at = read_json_at(text, at)
        values.append(value)
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too
    return values


def _read_list_answer(text: str) -> Sequence[CallDelta] | None:
    return _read_list(text) if _LIST_ATTEMPT.match(text) else None


def _read_list(text: str) -> Sequence[CallDelta]:
    return [call_of(name, arguments) for name, arguments in Reader(text).calls()]


def _write_python(call: CallDelta) -> str:
    arguments = json.loads(call.arguments)
    inside = ", ".join(f"{key}={write_literal(value)}" for key, value in arguments.items())
    return f"{call.name}({inside})"
