"""Reasoning between think tags, before anything else.

Owns the split only: what is outside the tags goes to the parser of tool calls behind it. White
space directly inside the tags and directly behind them belongs to the format. Templates whose
generation prompt opens the tag itself start inside.
"""

from __future__ import annotations

from forge.core.formats.base import Delta, Parser, ReasoningDelta
from forge.core.formats.tags import held_back

OPEN, CLOSE = "<think>", "</think>"
MARKS = frozenset({OPEN, CLOSE})


class ThinkParser:
    """Reads reasoning if the answer begins with it, then hands over to `inner`.

    Only the first block counts: a tag later on is text, as it is to chat templates.
    """

    def __init__(self, inner: Parser, *, inside: bool) -> None:
        self._inner = inner
        self._buffer = ""
        self._stage = "inside" if inside else "before"
        self._begun = False
        """Whether reasoning came that is not white space."""

    @property
    def error(self) -> str:
        return self._inner.error

    def feed(self, text: str) -> list[Delta]:
        if self._stage == "behind":
            return self._inner.feed(text)
        self._buffer += text
        deltas: list[Delta] = []
        if self._stage == "before":
            deltas += self._before()
        if self._stage == "inside":
            deltas += self._inside()
        if self._stage == "gap":
            deltas += self._gap()
        return deltas

    def finish(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self._stage == "before":
            deltas += self._inner.feed(self._buffer)
        elif self._stage == "inside":
            deltas += self._reasoning(self._buffer.rstrip())
        self._stage = "behind"
        return deltas + self._inner.finish()

    def _before(self) -> list[Delta]:
        """Nothing but white space came so far, or the beginning of the tag."""
        solid = self._buffer.lstrip()
        if solid.startswith(OPEN):
            self._buffer = solid[len(OPEN) :]
            self._stage = "inside"
            return []
        if OPEN.startswith(solid):
            return []
        self._stage = "behind"
        return self._inner.feed(self._buffer)

    def _inside(self) -> list[Delta]:
        reasoning, tag, rest = self._buffer.partition(CLOSE)
        if tag:
            self._buffer = rest
            self._stage = "gap"
            return self._reasoning(reasoning.rstrip())
        certain = self._buffer[: len(self._buffer) - held_back(self._buffer, (CLOSE,))].rstrip()
        self._buffer = self._buffer[len(certain) :]
        return self._reasoning(certain)

    def _gap(self) -> list[Delta]:
        rest = self._buffer.lstrip()
        if not rest:
            return []
        self._stage = "behind"
        return self._inner.feed(rest)

    def _reasoning(self, text: str) -> list[Delta]:
        if not self._begun:
            text = text.lstrip()
        if not text:
            return []
        self._begun = True
        return [ReasoningDelta(text=text)]
