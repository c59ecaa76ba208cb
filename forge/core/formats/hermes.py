"""The Hermes format, which Qwen shares: a JSON object between tool_call tags.

<tool_call>
{"name": "look", "arguments": {"at": "a"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from forge.core.formats.base import CallDelta, Parser, Tools
from forge.core.formats.parsers.blocks import Block, BlockParser
from forge.core.formats.parsers.calls import MalformedCall, call_of, outside_strings, read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat:
    """Hermes 2 and 3, Qwen 2.5 and Qwen 3, and many that were trained after them."""

    name = "hermes"
    gap = "\n"
    """Between tags and objects, and between calls, as the model writes them; any is read."""
    marks = frozenset({OPEN, CLOSE})
    signs: tuple[str, ...] = (OPEN,)
    takes_tools = True

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        return BlockParser(Block(open=OPEN, close=CLOSE, read=_read, complete=outside_strings))

    def opening(self, tool: str | None) -> str:
        """Return the text that forces a call of `tool`."""
        if tool is None:
            return f'{OPEN}{self.gap}{{"name": "'
        return f'{OPEN}{self.gap}{{"name": {json.dumps(tool)}, "arguments": '

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        gap = self.gap
        return gap.join(f"{OPEN}{gap}{write_call(call)}{gap}{CLOSE}" for call in calls)


class HermesCompactFormat(HermesFormat):
    """The same without line breaks, as the tiny model writes it."""

    name = "hermes_compact"
    gap = ""
    signs: tuple[str, ...] = ()


def write_call(call: CallDelta, *, arguments_key: str = "arguments") -> str:
    """A call as a JSON object."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name": {name}, "{arguments_key}": {call.arguments}}}'


def read_call(value: object) -> CallDelta:
    """A call of a JSON object; raises `MalformedCall`. Llama says "parameters"."""
    if not isinstance(value, dict):
        raise MalformedCall("a tool call that is not a JSON object")
    call_id = value.get("id")
    return call_of(
        value.get("name"),
        value.get("arguments", value.get("parameters")),
        call_id=call_id if isinstance(call_id, str) else "",
    )


def _read(body: str) -> Sequence[CallDelta]:
    return (read_call(read_json(body)),)
