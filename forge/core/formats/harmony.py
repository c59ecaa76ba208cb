"""Harmony, the format of gpt-oss: channels of messages.

An answer is one or more messages, after the prompt's `<|start|>assistant`:

    <|channel|>analysis<|message|>I must look.<|end|><|start|>assistant
    <|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": "a"}<|call|>

without the line break. The channel `analysis` is reasoning; `final` is content, and so is
`commentary` without a recipient (a preamble). A message to `functions.NAME` is a call. The
recipient may come before the channel, as chat templates write it. `<|return|>` and `<|call|>` are
end-of-turn tokens, which no text has.

Text without a header is content. A header without its end, and a call without an object of
arguments, become content with an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forge.core.formats.base import (
    CallDelta,
    Delta,
    NamedFirst,
    Parser,
    ReasoningDelta,
    TextDelta,
    Tools,
)
from forge.core.formats.parsers.calls import MalformedCall, call_of, outside_strings, read_json_at
from forge.core.formats.parsers.tags import first_tag, held_back

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CONSTRAIN = "<|end|>", "<|constrain|>"
_ENDS = (END, START)
_BEGINS = (f"{START}assistant", CHANNEL, "to=")
_RECIPIENT = re.compile(r"to=(?P<name>[^\s<]+)")
_ANALYSIS = re.compile(rf"{re.escape(CHANNEL)}\s*analysis\b")
MAX_HEADER_CHARS = 400
_FUNCTIONS = "functions."


class HarmonyParser:
    """Reads one answer."""

    def __init__(self, *, calls: bool) -> None:
        """`calls`: messages to functions are calls; otherwise they are content."""
        self.error = ""
        self._calls = calls
        self._buffer = ""
        self._header = ""
        """The header of the open message; "" for text without one."""
        self._stage = "header"

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are certain by now."""
        self._buffer += text
        deltas: list[Delta] = []
        while (step := self._step()) is not None:
            deltas += step
        return deltas

    def finish(self) -> list[Delta]:
        """Return the deltas of the text held back."""
        rest, self._buffer = self._buffer, ""
        if self._stage == "call":
            return self._call(rest)
        if self._stage == "header" and rest.strip() and _is_header(rest.lstrip()):
            self._flag("a message header without an end")
        if self._stage == "header" and not rest.strip():
            return []
        return self._said(rest)

    def _step(self) -> list[Delta] | None:
        """Return the deltas of one more part; None if more text is needed."""
        match self._stage:
            case "header":
                return self._read_header()
            case "call":
                return self._read_call()
            case _:
                return self._read_text()

    def _read_header(self) -> list[Delta] | None:
        solid = self._buffer.lstrip()
        if not _is_header(solid):
            if not solid or any(begin.startswith(solid) for begin in _BEGINS):
                return None
            self._header, self._stage = "", "text"
            return []
        end = self._buffer.find(MESSAGE)
        if end > MAX_HEADER_CHARS or (end < 0 and len(self._buffer) > MAX_HEADER_CHARS):
            self._flag("a message header without an end")
            text, self._buffer = self._buffer[:MAX_HEADER_CHARS], self._buffer[MAX_HEADER_CHARS:]
            self._header, self._stage = "", "text"
            return [TextDelta(text=text)]
        if end < 0:
            return None
        self._header, self._buffer = self._buffer[:end], self._buffer[end + len(MESSAGE) :]
        self._stage = "call" if self._calls and _RECIPIENT.search(self._header) else "text"
        return []

    def _read_text(self) -> list[Delta] | None:
        found = first_tag(self._buffer, _ENDS)
        if found is None:
            keep = held_back(self._buffer, _ENDS)
            certain = self._buffer[: len(self._buffer) - keep]
            if not certain:
                return None
            self._buffer = self._buffer[len(certain) :]
            return self._said(certain)
        position, tag = found
        text = self._buffer[:position]
        # A start without an end begins the next message.
        self._buffer = self._buffer[position + (len(tag) if tag == END else 0) :]
        deltas = self._said(text)
        self._header, self._stage = "", "header"
        if tag == START and not self._buffer.startswith(_BEGINS[0]):
            if _BEGINS[0].startswith(self._buffer):
                return deltas or None
            self._buffer = self._buffer[len(START) :]
            self._stage = "text"
            return [*deltas, TextDelta(text=START)]
        return deltas

    def _read_call(self) -> list[Delta] | None:
        at = -1
        while (at := self._buffer.find(END, at + 1)) >= 0:
            if outside_strings(self._buffer[:at]):
                body, self._buffer = self._buffer[:at], self._buffer[at + len(END) :]
                return self._call(body)
        return None

    def _call(self, body: str) -> list[Delta]:
        recipient = _RECIPIENT.search(self._header)
        assert recipient is not None, "the stage of calls"
        header, self._header, self._stage = self._header, "", "header"
        try:
            arguments, end = read_json_at(body, 0)
            if body[end:].strip():
                raise MalformedCall("a tool call with something behind its arguments")
            return [call_of(recipient["name"].removeprefix(_FUNCTIONS), arguments)]
        except MalformedCall as error:
            self._flag(str(error))
            return [TextDelta(text=f"{header}{MESSAGE}{body}")]

    def _said(self, text: str) -> list[Delta]:
        """Return text of the open message."""
        if not text:
            return []
        if _ANALYSIS.search(self._header):
            return [ReasoningDelta(text=text)]
        return [TextDelta(text=text)]

    def _flag(self, error: str) -> None:
        self.error = self.error or error


class HarmonyFormat(NamedFirst):
    """gpt-oss."""

    name = "harmony"
    signs: tuple[str, ...] = (CHANNEL, MESSAGE, START)
    takes_tools = True
    reads_channels = True
    """The parser reads complete answers: reasoning, content and calls."""
    around_name = f"{CHANNEL}commentary to={_FUNCTIONS}", f" {CONSTRAIN}json{MESSAGE}"

    @property
    def marks(self) -> frozenset[str]:
        """Return all tags."""
        return frozenset((START, CHANNEL, MESSAGE, END, CONSTRAIN))

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer; without tools, calls are content."""
        return HarmonyParser(calls=bool(tools))

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does."""
        return f"{END}{START}assistant".join(
            self.opening(call.name) + call.arguments for call in calls
        )


def _is_header(text: str) -> bool:
    """Whether a text begins like a header, not like content."""
    return text.startswith(_BEGINS)
