"""No tool calls at all: every text is content."""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.errors import InvalidArgument
from forge.core.formats.base import CallDelta, Delta, Parser, TextDelta, Tools


class PlainParser:
    def __init__(self) -> None:
        self.error = ""

    def feed(self, text: str) -> list[Delta]:
        return [TextDelta(text=text)] if text else []

    def finish(self) -> list[Delta]:
        return []


class PlainFormat:
    """For models whose template knows no tools, and for answers that must not call any."""

    name = "plain"
    marks: frozenset[str] = frozenset()
    signs: tuple[str, ...] = ()
    takes_tools = False

    def parser(self, tools: Tools = ()) -> Parser:
        return PlainParser()

    def opening(self, tool: str | None) -> str:
        raise _no_calls()

    def write(self, calls: Sequence[CallDelta]) -> str:
        if calls:
            raise _no_calls()
        return ""


def _no_calls() -> InvalidArgument:
    return InvalidArgument("this model's chat template knows no tools, so no call can be required")
