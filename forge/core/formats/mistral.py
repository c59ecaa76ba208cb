"""Mistral: calls after a token, up to the end of the answer.

    mistral       [TOOL_CALLS][{"name": "look", "arguments": {"at": "a"}, "id": "123456789"}]
    mistral_v11   [TOOL_CALLS]look[ARGS]{"at": "a"}[TOOL_CALLS]look[ARGS]{"at": "b"}

In `mistral_v11` the model's own id may follow the name after `[CALL_ID]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from forge.core.formats.base import CallDelta, NamedFirst, Parser, Tools
from forge.core.formats.hermes import read_call, write_call
from forge.core.formats.parsers.blocks import Block, BlockParser
from forge.core.formats.parsers.calls import MalformedCall, call_of, outside_strings, read_json

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(
    r"\s*(?P<name>[^\[{\s]+)\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\])?(?P<arguments>\s*{.*)",
    re.DOTALL,
)


class MistralFormat:
    """Mistral 7B v0.3 to Small 3.1: one array of all calls."""

    name = "mistral"
    marks = frozenset({CALLS})
    signs: tuple[str, ...] = (CALLS,)
    takes_tools = True

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        return BlockParser(Block(open=CALLS, close="", read=_read_array, complete=outside_strings))

    def opening(self, tool: str | None) -> str:
        """Return the text that forces a call of `tool`."""
        begun = f'{CALLS}[{{"name": '
        return f'{begun}"' if tool is None else f'{begun}{json.dumps(tool)}, "arguments": '

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        return f"{CALLS}[{', '.join(write_call(call) for call in calls)}]"


class MistralV11Format(NamedFirst):
    """Mistral from tokenizer v11 on: Small 3.2, Magistral, Devstral, Ministral 3."""

    name = "mistral_v11"
    marks = frozenset({CALLS, ARGS, CALL_ID})
    signs: tuple[str, ...] = (CALLS, ARGS)
    takes_tools = True
    around_name = CALLS, ARGS

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        return BlockParser(Block(open=CALLS, close="", read=_read_named, complete=outside_strings))

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        return "".join(
            CALLS
            + call.name
            + (CALL_ID + call.call_id if call.call_id else "")
            + ARGS
            + call.arguments
            for call in calls
        )


def _read_array(body: str) -> Sequence[CallDelta]:
    calls = read_json(body)
    if not isinstance(calls, list) or not calls:
        raise MalformedCall("tool calls that are not a JSON array")
    return [read_call(call) for call in calls]


def _read_named(body: str) -> Sequence[CallDelta]:
    found = _NAMED.fullmatch(body)
    if found is None:
        raise MalformedCall("a tool call that is not a name and arguments")
    return (call_of(found["name"], read_json(found["arguments"]), call_id=found["id"] or ""),)
