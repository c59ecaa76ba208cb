"""The messages of one request; decodes only the new ones.

An agent sends its whole history with every request and rarely changes earlier messages. A `Mark`
recognizes the bytes of an earlier request at the start of a later one by their SHA-256, so they are
not decoded and compared again. Two different texts with the same SHA-256 are unknown; a search
would take 2**128 attempts, and spoil only the searcher's own session.

Owns no protocol: the decoder is a function argument. Message boundaries are those of a JSON array;
a subclass may change them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from forge.core.conversation.messages import Message

Read = Callable[[bytes, int], list[Message]]
"""Decodes a JSON array of messages; the number counts the messages before them."""

_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The first bytes of a request, up to the end of its last message."""

    size_bytes: int
    digest: bytes
    """SHA-256 of these bytes."""
    messages: int


class History(Sequence[Message]):
    """A sequence of messages over their JSON array."""

    __slots__ = ("_all", "_behind", "_end", "_hash", "_hashed", "_raw", "_read")

    def __init__(self, raw: bytes | memoryview, read: Read) -> None:
        """`raw` is a JSON array."""
        self._raw = memoryview(raw)
        self._read = read
        self._all: list[Message] | None = None
        self._behind: tuple[int, list[Message]] | None = None
        self._end = self._last_message_end()
        self._hash = hashlib.sha256()
        self._hashed = 0

    def known(self, marks: Iterable[Mark]) -> Mark | None:
        """Return the longest of `marks` at the start of this request."""
        found = None
        for mark in sorted(marks, key=lambda mark: mark.size_bytes):
            if self._ends_message(mark.size_bytes) and self._digest(mark.size_bytes) == mark.digest:
                found = mark
        return found

    def behind(self, mark: Mark | None) -> list[Message]:
        """Return the messages after those of `mark`; all messages without one."""
        if mark is None:
            return self._whole()
        if self._behind is None or self._behind[0] != mark.messages:
            read = self._read(self._rest(mark.size_bytes), mark.messages)
            self._behind = (mark.messages, read)
        return self._behind[1]

    def mark(self) -> Mark:
        """Return a mark that recognizes this request at the start of later ones."""
        digest = self._digest(self._end)
        return Mark(size_bytes=self._end, digest=digest, messages=len(self))

    def __len__(self) -> int:
        if self._all is None and self._behind is not None:
            return self._behind[0] + len(self._behind[1])
        return len(self._whole())

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        return self._whole()[at]

    def _whole(self) -> list[Message]:
        if self._all is None:
            self._all = self._read(bytes(self._raw), 0)
        return self._all

    def _rest(self, size_bytes: int) -> bytes:
        """Return the messages behind `size_bytes`, as a JSON array."""
        return b"[" + bytes(self._raw[size_bytes:]).lstrip(_SPACE).removeprefix(b",")

    def _last_message_end(self) -> int:
        """Return the end of the last message, before the bracket and the white space around it."""
        end = len(self._raw)
        while end and self._raw[end - 1] in _SPACE:
            end -= 1
        end = max(0, end - 1)
        while end and self._raw[end - 1] in _SPACE:
            end -= 1
        return end

    def _ends_message(self, size_bytes: int) -> bool:
        """Whether a message may end there; only then a mark of that size can match."""
        return size_bytes <= self._end and (
            size_bytes == self._end
            or bytes(self._raw[size_bytes : size_bytes + 64]).lstrip(_SPACE).startswith(b",")
        )

    def _digest(self, size_bytes: int) -> bytes:
        """Return the digest of the first bytes; in growing order each byte is hashed once."""
        if size_bytes < self._hashed:
            return hashlib.sha256(self._raw[:size_bytes]).digest()
        self._hash.update(self._raw[self._hashed : size_bytes])
        self._hashed = size_bytes
        return self._hash.digest()
