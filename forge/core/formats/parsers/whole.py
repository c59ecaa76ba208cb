"""Answers that are calls from their first character on: Llama's JSON and Python lists.

An answer that begins like a call is read at its end, any other passes on at once. These formats
have no tags, so an answer that only looks like a call (a list, a requested JSON object) is content
without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.core.formats.base import CallDelta, Delta, Parser, TextDelta
from forge.core.formats.parsers.calls import MalformedCall


class WholeParser:
    """Reads one answer; `inner` reads answers that do not begin with `start`."""

    def __init__(
        self, start: str, read: Callable[[str], Sequence[CallDelta] | None], inner: Parser
    ) -> None:
        """`read` returns None for a text without a call, and raises `MalformedCall`."""
        self._start = start
        self._read = read
        self._inner = inner
        self._error = ""
        self._held: list[str] = []
        self._stage = "before"

    @property
    def error(self) -> str:
        """Return the first error, its own or the inner parser's."""
        return self._error or self._inner.error

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are certain by now."""
        if self._stage == "content":
            return self._inner.feed(text)
        self._held.append(text)
        if self._stage == "held" or not text.strip():
            return []
        if text.lstrip().startswith(self._start):
            self._stage = "held"
            return []
        self._stage = "content"
        return self._inner.feed("".join(self._held))

    def finish(self) -> list[Delta]:
        """Return the deltas of the text held back."""
        if self._stage == "content":
            return self._inner.finish()
        text = "".join(self._held)
        if self._stage == "before":
            return [*self._inner.feed(text), *self._inner.finish()]
        try:
            calls = self._read(text)
        except MalformedCall as error:
            self._error = str(error)
            calls = None
        return [*calls] if calls is not None else [TextDelta(text=text)]
