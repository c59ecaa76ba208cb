"""Reasoning between two tags, before anything else.

Owns the split and the names of the tags: what is outside goes to the parser of tool calls behind
it. White space directly inside the tags and directly behind them belongs to the format. Where the
prompt ends with the opening tag, or the model never writes one, the answer starts inside.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.core.formats.base import Delta, Parser, ReasoningDelta
from forge.core.formats.tags import held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model sets off what it thinks."""

    name: str
    open: str
    close: str
    starts_inside: bool = False
    """Whether an answer begins with reasoning though neither it nor the prompt says so."""

    @property
    def marks(self) -> frozenset[str]:
        """Return both tags."""
        return frozenset({self.open, self.close})

    @property
    def closing(self) -> str:
        """What ends reasoning that the prompt has opened."""
        return f"\n{self.close}\n\n"

    def opened_by(self, prompt: str) -> bool:
        """Whether an answer to `prompt`, or to what ends like it, starts inside."""
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
    """Reads reasoning if the answer begins with it, then hands over to `inner`.

    Only the first block counts: a tag later on is text, as it is to chat templates.
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
        """Whether reasoning came that is not white space."""

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
        """Nothing but white space came so far, or the beginning of a tag.

        Models repeat the tag that the prompt has, and close reasoning that nobody opened.
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
