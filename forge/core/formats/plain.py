"""The format without tool calls: all text is content."""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.errors import InvalidArgument
from forge.core.formats.base import CallDelta, Delta, Parser, TextDelta, Tools


class PlainParser:
    """Passes all text on."""

    def __init__(self) -> None:
        self.error = ""

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are certain by now."""
        return [TextDelta(text=text)] if text else []

    def finish(self) -> list[Delta]:
        """Return nothing: no text is held back."""
        return []


class PlainFormat:
    """For models whose template knows no tools, and for answers that must not call any."""

    name = "plain"
    marks: frozenset[str] = frozenset()
    signs: tuple[str, ...] = ()
    takes_tools = False

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer."""
        return PlainParser()

    def opening(self, tool: str | None) -> str:
        """Raises `InvalidArgument`: the format has no calls."""
        raise _no_calls()

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Raises `InvalidArgument` for any call."""
        if calls:
            raise _no_calls()
        return ""


def _no_calls() -> InvalidArgument:
    return InvalidArgument("this model's chat template knows no tools, so no call can be required")
