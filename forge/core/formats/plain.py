"""No tool calls at all: every text is content."""

from __future__ import annotations

from forge.core.errors import InvalidArgument
from forge.core.formats.base import Delta, Parser, TextDelta


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
    takes_tools = False

    def parser(self) -> Parser:
        return PlainParser()

    def opening(self, tool: str | None) -> str:
        raise InvalidArgument(
            "this model's chat template knows no tools, so no call can be required"
        )
