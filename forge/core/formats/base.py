"""What an output format is: how a model writes reasoning and tool calls into its text.

Owns the vocabulary of parsers. A format makes one parser per answer; the parser takes text as it
is sampled, in whatever pieces, and gives deltas; fed all at once it gives the same answer.

A parser never raises for what a model wrote and never swallows any of it. What is malformed
comes out as text, and `error` says what was wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Tools = Sequence[Mapping[str, Any]]
"""Tool definitions as OpenAI's protocol has them: `{"type": "function", "function": {...}}`."""


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
    """One whole tool call, as soon as its end was seen."""

    name: str
    arguments: str
    """A JSON object."""
    call_id: str = ""
    """What the model itself called the call, where its format has that; else whoever hands the
    call to an agent makes one up."""


Delta = TextDelta | ReasoningDelta | CallDelta


class Parser(Protocol):
    """Reads one answer."""

    @property
    def error(self) -> str:
        """ "" or what was malformed so far; the first finding stays."""

    def feed(self, text: str) -> list[Delta]:
        """Takes more text and gives what is certain by now."""

    def finish(self) -> list[Delta]:
        """The text has ended: gives what was held back."""


class OutputFormat(Protocol):
    """A way of writing tool calls."""

    name: str
    signs: tuple[str, ...]
    """What stands in every chat template that asks for this format; () for what shows no sign."""
    takes_tools: bool

    @property
    def marks(self) -> frozenset[str]:
        """Tags; where a tokenizer has them as special tokens, they are kept in the text."""

    def parser(self, tools: Tools = ()) -> Parser:
        """A parser for one answer. `tools` say of which types arguments are, where the format
        does not."""

    def opening(self, tool: str | None) -> str:
        """Text that leaves the model no choice but to call `tool` (None: any tool)."""

    def write(self, calls: Sequence[CallDelta]) -> str:
        """The calls as a model that masters the format writes them: parsed, they are the same."""


@runtime_checkable
class ElementFormat(Protocol):
    """A format that writes each argument as a text, nothing of it escaped, between tags."""

    argument_end: str
    """What ends an argument, and stands in none."""
    inner: tuple[str, ...]
    """Beginnings of other elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer, parsed."""

    content: str
    reasoning: str
    calls: tuple[CallDelta, ...]
    error: str


def collect(deltas: Iterable[Delta], error: str) -> Answer:
    """Puts an answer together from its deltas."""
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
    return Answer(
        content="".join(content), reasoning="".join(reasoning), calls=tuple(calls), error=error
    )
