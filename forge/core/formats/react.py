"""Plain ReAct: calls as lines of text, for models whose template knows no tools.

    Thought: I must look.
    Action: look
    Action Input: {"at": "a"}

The answer ends there; an `Observation:` after it is the model's invention and an error. The text
before the action, and a final answer, are content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forge.core.formats.base import CallDelta, Delta, Parser, TextDelta, Tools
from forge.core.formats.parsers.blocks import Block, BlockParser
from forge.core.formats.parsers.calls import MalformedCall, call_of, outside_strings, read_json

ACTION, INPUT, OBSERVATION = "\nAction:", "\nAction Input:", "\nObservation:"
_CALL = re.compile(r"\s*(?P<name>\S+)[ \t]*\nAction Input:(?P<arguments>.*)", re.DOTALL)


class LineParser:
    """Matches tags that begin with a line break also on the first line."""

    def __init__(self, inner: Parser) -> None:
        self._inner = inner
        self._begun = False
        self._given = False

    @property
    def error(self) -> str:
        """Return the error of the inner parser."""
        return self._inner.error

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are certain by now."""
        if not text:
            return []
        break_before = "" if self._begun else "\n"
        self._begun = True
        return self._without_break(self._inner.feed(break_before + text))

    def finish(self) -> list[Delta]:
        """Return the deltas of the text held back."""
        return self._without_break(self._inner.finish())

    def _without_break(self, deltas: list[Delta]) -> list[Delta]:
        if self._given or not deltas:
            return deltas
        self._given = True
        first, *rest = deltas
        if not isinstance(first, TextDelta):
            return deltas
        return [*([TextDelta(text=first.text[1:])] if first.text[1:] else []), *rest]


class ReActFormat:
    """Thought, Action, Action Input."""

    name = "react"
    marks: frozenset[str] = frozenset()
    signs: tuple[str, ...] = ("Action:", "Action Input:")
    takes_tools = True

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        block = Block(
            open=ACTION,
            close="",
            read=_read,
            complete=outside_strings,
            inner=(INPUT, OBSERVATION),
        )
        return LineParser(BlockParser(block))

    def opening(self, tool: str | None) -> str:
        """Return the text that forces a call of `tool`."""
        return "Action:" if tool is None else f"Action: {tool}\nAction Input:"

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        return "\n".join(f"Action: {call.name}\nAction Input: {call.arguments}" for call in calls)


def _read(body: str) -> Sequence[CallDelta]:
    found = _CALL.fullmatch(body)
    if found is None:
        raise MalformedCall("an action without an action input")
    arguments = found["arguments"]
    if OBSERVATION in arguments:
        raise MalformedCall("an action with an observation that the model made up")
    return (call_of(found["name"], read_json(arguments)),)
