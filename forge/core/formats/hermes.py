"""The Hermes format, which Qwen shares: a JSON object between tool_call tags.

    <tool_call>
    {"name": "look", "arguments": {"at": "a"}}
    </tool_call>

White space around a block belongs to the format and not to the content. A block that is not a
JSON object with a name and an object of arguments, a block without an end and an end without a
block come out as the text they are, flagged.
"""

from __future__ import annotations

import json

from forge.core.formats.base import CallDelta, Delta, Parser, TextDelta
from forge.core.formats.tags import first_tag, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class MalformedCall(Exception):
    """What is wrong with a block, in words."""


class HermesParser:
    def __init__(self) -> None:
        self.error = ""
        self._buffer = ""
        self._in_block = False
        self._space = ""
        """White space not yet known to be content: dropped if a block comes next."""
        self._after_call = False

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while self._in_block or self._buffer:
            found = first_tag(self._buffer, (CLOSE,) if self._in_block else (OPEN, CLOSE))
            if found is None:
                break
            position, tag = found
            before = self._buffer[:position]
            self._buffer = self._buffer[position + len(tag) :]
            deltas += self._at_tag(tag, before)
        if not self._in_block:
            keep = held_back(self._buffer, (OPEN, CLOSE))
            certain = self._buffer[: len(self._buffer) - keep]
            self._buffer = self._buffer[len(certain) :]
            deltas += self._text(certain)
        return deltas

    def finish(self) -> list[Delta]:
        rest, self._buffer = self._buffer, ""
        if self._in_block:
            self._in_block = False
            self._flag("a tool call without an end")
            rest = OPEN + rest
        elif self._after_call and not rest:
            self._space = ""
        return self._text(rest) + self._flush_space()

    def _at_tag(self, tag: str, before: str) -> list[Delta]:
        if self._in_block:
            self._in_block = False
            return self._block(before)
        if tag == OPEN:
            self._in_block = True
            return self._text(before)
        self._flag("the end of a tool call that never began")
        return self._text(before + tag)

    def _block(self, body: str) -> list[Delta]:
        try:
            call = parse_call(body)
        except MalformedCall as error:
            self._flag(str(error))
            return self._text(OPEN + body + CLOSE)
        self._space = ""
        self._after_call = True
        return [call]

    def _text(self, text: str) -> list[Delta]:
        """Content, its trailing white space withheld, for it may stand before a block."""
        text = self._space + text
        solid = text.rstrip()
        self._space = text[len(solid) :]
        if not solid:
            return []
        if self._after_call:
            solid = solid.lstrip()
            self._after_call = False
        return [TextDelta(text=solid)]

    def _flush_space(self) -> list[Delta]:
        space, self._space = self._space, ""
        return [TextDelta(text=space)] if space else []

    def _flag(self, what: str) -> None:
        self.error = self.error or what


class HermesFormat:
    """Hermes 2/3, Qwen 2.5 and Qwen 3."""

    name = "hermes"
    marks = frozenset({OPEN, CLOSE})
    takes_tools = True

    def parser(self) -> Parser:
        return HermesParser()

    def opening(self, tool: str | None) -> str:
        if tool is None:
            return f'{OPEN}\n{{"name": "'
        return f'{OPEN}\n{{"name": {json.dumps(tool)}, "arguments": '


def parse_call(body: str) -> CallDelta:
    """Reads the inside of a block; raises `MalformedCall`."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"a tool call that is not JSON: {error}"[:200]) from None
    if not isinstance(value, dict):
        raise MalformedCall("a tool call that is not a JSON object")
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name or not _encodable(name):
        raise MalformedCall("a tool call without a name")
    if not isinstance(arguments, dict):
        raise MalformedCall(f"a call of {name[:60]} without an object of arguments")
    spelt = json.dumps(arguments, ensure_ascii=False)
    if not _encodable(spelt):
        spelt = json.dumps(arguments)
    return CallDelta(name=name, arguments=spelt)


def _encodable(text: str) -> bool:
    """False for half surrogates: models do write "\\ud83d" and stop."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
