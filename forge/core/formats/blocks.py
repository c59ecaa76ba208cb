"""Content with blocks of calls in it: the parser behind every format that has tags.

Owns the stream: where a block begins and ends, and whose the white space around it is (nobody's).
What a block says is read by the format that describes it. A block that cannot be read, one without
an end, and tags that only belong inside of one come out as the text they are, flagged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge.core.formats.base import CallDelta, Delta, TextDelta
from forge.core.formats.calls import MalformedCall
from forge.core.formats.tags import first_tag, held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How a format marks its calls."""

    open: str
    close: str
    """"" for a block that lasts until the next begins, or the text ends."""
    read: Callable[[str], Sequence[CallDelta]]
    """Calls of what stands between the tags; raises `MalformedCall`."""
    complete: Callable[[str], bool]
    """Whether a closing tag behind this text closes the block: arguments may contain the tag."""
    inner: tuple[str, ...] = ()
    """Tags that are malformed outside of a block, as is `close`."""


class BlockParser:
    """Reads one answer."""

    def __init__(self, block: Block) -> None:
        self.error = ""
        self._block = block
        self._outside = tuple(tag for tag in (block.open, block.close, *block.inner) if tag)
        self._buffer = ""
        self._searched = 0
        """Where in the buffer a closing tag may still begin."""
        self._in_block = False
        self._space = ""
        """White space not yet known to be content: dropped if a block comes next."""
        self._after_call = False

    def feed(self, text: str) -> list[Delta]:
        """Take more text; return the deltas that are certain by now."""
        self._buffer += text
        deltas: list[Delta] = []
        while (step := self._inside() if self._in_block else self._content()) is not None:
            deltas += step
        if not self._in_block:
            certain = len(self._buffer) - held_back(self._buffer, self._outside)
            deltas += self._text(self._take(certain))
        return deltas

    def finish(self) -> list[Delta]:
        """Return the deltas of the text held back."""
        rest = self._take(len(self._buffer))
        if not self._in_block:
            return self._text(rest) + self._flush_space()
        self._in_block = False
        if not self._block.close:
            return self._read(rest) + self._flush_space()
        self._flag("a tool call without an end")
        return self._text(self._block.open + rest) + self._flush_space()

    def _content(self) -> list[Delta] | None:
        """Text up to the next tag, if there is one."""
        found = first_tag(self._buffer, self._outside)
        if found is None:
            return None
        position, tag = found
        before = self._take(position + len(tag))[:position]
        if tag == self._block.open:
            self._in_block = True
            return self._text(before)
        self._flag(f"{tag} of a tool call that never began")
        return self._text(before + tag)

    def _inside(self) -> list[Delta] | None:
        """The calls of a block, once its end has come."""
        end = self._block.close or self._block.open
        while (position := self._buffer.find(end, self._searched)) >= 0:
            if self._block.complete(self._buffer[:position]):
                # Where blocks have no end of their own, the next one has begun.
                self._in_block = not self._block.close
                return self._read(self._take(position + len(end))[:position])
            self._searched = position + len(end)
        self._searched = max(self._searched, len(self._buffer) - len(end) + 1)
        return None

    def _read(self, body: str) -> list[Delta]:
        try:
            calls = list(self._block.read(body))
        except MalformedCall as error:
            self._flag(str(error))
            return self._text(self._block.open + body + self._block.close)
        self._space = ""
        self._after_call = True
        return [*calls]

    def _text(self, text: str) -> list[Delta]:
        """Content, its trailing white space withheld, for it may stand before a block."""
        text = self._space + text
        solid = text.rstrip()
        self._space = text[len(solid) :]
        if not solid:
            return []
        if self._after_call:
            solid = solid.lstrip()
            self._after_call = False
        return [TextDelta(text=solid)]

    def _flush_space(self) -> list[Delta]:
        space, self._space = self._space, ""
        return [TextDelta(text=space)] if space and not self._after_call else []

    def _take(self, count: int) -> str:
        """The first `count` characters, taken off the buffer."""
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._searched = 0
        return taken

    def _flag(self, what: str) -> None:
        self.error = self.error or what
