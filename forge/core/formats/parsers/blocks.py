"""Text with blocks of calls: the parser of every format with tags.

Finds the start and the end of blocks and drops the white space around them; the format reads the
text of a block. An unreadable block, a block without an end, and tags outside of a block become
text with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge.core.formats.base import CallDelta, Delta, TextDelta
from forge.core.formats.parsers.calls import MalformedCall
from forge.core.formats.parsers.tags import first_tag, held_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The tags of a format's calls."""

    open: str
    close: str
    """"" for a block that lasts until the next begins, or the text ends."""
    read: Callable[[str], Sequence[CallDelta]]
    """Reads the calls between the tags; raises `MalformedCall`."""
    complete: Callable[[str], bool]
    """Whether a closing tag after this text closes the block: arguments may contain the tag."""
    inner: tuple[str, ...] = ()
    """Tags that are errors outside of a block, as is `close`."""


class BlockParser:
    """Reads one answer."""

    def __init__(self, block: Block) -> None:
        self.error = ""
        self._block = block
        self._outside = tuple(tag for tag in (block.open, block.close, *block.inner) if tag)
        self._buffer = ""
        self._searched = 0
        """First place in the buffer where a closing tag may begin."""
        self._in_block = False
        self._space = ""
        """White space that is dropped if a block comes next."""
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
        """Return the text up to the next tag; None without one."""
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
        """Return the calls of a complete block; None before its end."""
        end = self._block.close or self._block.open
        while (position := self._buffer.find(end, self._searched)) >= 0:
            if self._block.complete(self._buffer[:position]):
                # Without a closing tag, the next block has begun.
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
        """Return content without its trailing white space, which may precede a block."""
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
        """Remove the first `count` characters from the buffer and return them."""
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._searched = 0
        return taken

    def _flag(self, what: str) -> None:
        self.error = self.error or what
