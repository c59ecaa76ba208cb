"""Reasoning between two tags at the start of an answer.

Owns the split and the tags; the text after the reasoning goes to the parser of tool calls. White
space directly inside and after the tags belongs to the format. If the prompt ends with the opening
tag, or the model never writes one, the answer starts inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.core.formats.base import Delta, Parser, ReasoningDelta
from forge.core.formats.parsers.tags import held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The tags of a model's reasoning."""

    name: str
    open: str
    close: str
    starts_inside: bool = False
    """Whether an answer begins with reasoning without an opening tag."""

    @property
    def marks(self) -> frozenset[str]:
        """Return both tags."""
        return frozenset({self.open, self.close})

    @property
    def closing(self) -> str:
        """Return the text that closes reasoning opened by the prompt."""
        return f"\n{self.close}\n\n"

    def opened_by(self, prompt: str) -> bool:
        """Whether an answer to `prompt`, or to its last part, starts inside."""
        if prompt.rstrip().endswith(self.close):
            return False
        return self.starts_inside or prompt.rstrip().endswith(self.open)

    def parser(self, inner: Parser, *, inside: bool) -> Parser:
        """Return a parser before `inner`; `inside`: the answer begins with reasoning."""
        return ThinkParser(inner, inside=inside, open_tag=self.open, close_tag=self.close)


THINK = ReasoningFormat(name="think", open="<think>", close="</think>")
THINK_CLOSE = ReasoningFormat(
    name="think_close", open="<think>", close="</think>", starts_inside=True
)
MISTRAL_THINK = ReasoningFormat(name="mistral_think", open="[THINK]", close="[/THINK]")


class ThinkParser:
    """Reads reasoning at the start of an answer, then passes the rest to `inner`.

    Only the first block counts: later tags are text, as in chat templates.
    """

    def __init__(
        self,
        inner: Parser,
        *,
        inside: bool,
        open_tag: str = THINK.open,
        close_tag: str = THINK.close,
    ) -> None:
        self._inner = inner
        self._open = open_tag
        self._close = close_tag
        self._buffer = ""
        self._stage = "opened" if inside else "before"
        self._begun = False
        """Whether reasoning other than white space has come."""

    @property
    def error(self) -> str:
        """Return the error of the inner parser."""
        return self._inner.error

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are certain by now."""
        if self._stage == "behind":
            return self._inner.feed(text)
        self._buffer += text
        deltas: list[Delta] = []
        if self._stage in ("before", "opened"):
            deltas += self._beginning()
        if self._stage == "inside":
            deltas += self._inside()
        if self._stage == "gap":
            deltas += self._gap()
        return deltas

    def finish(self) -> list[Delta]:
        """Return the deltas of the text held back."""
        deltas: list[Delta] = []
        if self._stage == "before":
            deltas += self._inner.feed(self._buffer)
        elif self._stage in ("opened", "inside"):
            deltas += self._reasoning(self._buffer.rstrip())
        self._stage = "behind"
        return deltas + self._inner.finish()

    def _beginning(self) -> list[Delta]:
        """Handle white space, or the start of a tag, at the start of the answer.

        Models repeat the prompt's opening tag, and write a closing tag without an opening one.
        """
        solid = self._buffer.lstrip()
        for tag, stage in ((self._open, "inside"), (self._close, "gap")):
            if solid.startswith(tag):
                self._buffer = solid[len(tag) :]
                self._stage = stage
                return []
            if tag.startswith(solid):
                return []
        if self._stage == "opened":
            self._stage = "inside"
            return []
        self._stage = "behind"
        return self._inner.feed(self._buffer)

    def _inside(self) -> list[Delta]:
        reasoning, tag, rest = self._buffer.partition(self._close)
        if tag:
            self._buffer = rest
            self._stage = "gap"
            return self._reasoning(reasoning.rstrip())
        keep = held_back(self._buffer, (self._close,))
        certain = self._buffer[: len(self._buffer) - keep].rstrip()
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
