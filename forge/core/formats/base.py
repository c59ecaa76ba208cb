"""The contract of output formats: reasoning and tool calls in a model's text.

A format makes one parser per answer. The parser takes sampled text in any pieces and returns
deltas; the pieces do not change the answer.

A parser never raises for a model's text and drops none of it. Malformed parts become text, and
`error` has the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Tools = Sequence[Mapping[str, Any]]
"""Tool definitions of OpenAI's protocol: `{"type": "function", "function": {...}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """New text of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """New text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """One complete tool call."""

    name: str
    arguments: str
    """A JSON object."""
    call_id: str = ""
    """The model's own id, in formats that have one; otherwise the gateway invents an id for the
    agent."""


Delta = TextDelta | ReasoningDelta | CallDelta


class Parser(Protocol):
    """Reads one answer."""

    @property
    def error(self) -> str:
        """Return the first error so far, or ""."""

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are certain by now."""

    def finish(self) -> list[Delta]:
        """End the text; return the deltas of the text held back."""


class OutputFormat(Protocol):
    """A format of tool calls."""

    name: str
    signs: tuple[str, ...]
    """Texts in every chat template of this format; () if there are none."""
    takes_tools: bool

    @property
    def marks(self) -> frozenset[str]:
        """Return the tags; decoding keeps them even if they are special tokens."""

    def parser(self, tools: Tools = ()) -> Parser:
        """Return a parser for one answer. `tools` give the types of arguments in formats without
        types."""

    def opening(self, tool: str | None) -> str:
        """Return the text that forces a call of `tool` (None: any tool)."""

    def write(self, calls: Sequence[CallDelta]) -> str:
        """Write the calls as the model does; the parser reads the same calls back."""


class NamedFirst:
    """Base of the formats with the tool's name as plain text before the arguments."""

    around_name: tuple[str, str]
    """Texts before and after the name."""

    def opening(self, tool: str | None) -> str:
        """Return the text that forces a call of `tool` (None: any tool)."""
        before, after = self.around_name
        return before if tool is None else before + tool + after


@runtime_checkable
class ElementFormat(Protocol):
    """A format with each argument as an unescaped text between tags."""

    argument_end: str
    """Text that ends an argument and is in none."""
    inner: tuple[str, ...]
    """Beginnings of other elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """A parsed answer."""

    content: str
    reasoning: str
    calls: tuple[CallDelta, ...]
    error: str


def reads_channels(output: OutputFormat) -> bool:
    """Whether the parser of a format reads complete answers, with reasoning and without tools too;
    such a format says so in an attribute of this name."""
    return bool(getattr(output, "reads_channels", False))


def collect(deltas: Iterable[Delta], error: str) -> ParsedAnswer:
    """Join the deltas of an answer."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[CallDelta] = []
    for delta in deltas:
        match delta:
            case TextDelta(text=text):
                content.append(text)
            case ReasoningDelta(text=text):
                reasoning.append(text)
            case CallDelta():
                calls.append(delta)
    return ParsedAnswer(
        content="".join(content), reasoning="".join(reasoning), calls=tuple(calls), error=error
    )
