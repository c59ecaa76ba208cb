"""Chunks of at most 1 MiB for messages above gRPC's limit; items grouped by count and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from forge.core.errors import InvalidArgument, ResourceExhausted
from forge.v1.common_pb2 import Chunk

CHUNK_BYTES = 1 << 20

Item = TypeVar("Item")


def split(data: bytes) -> Iterator[Chunk]:
    """Yield at least one chunk; the last one has `last` set."""
    view = memoryview(data)
    end = max(len(data), 1)
    for start in range(0, end, CHUNK_BYTES):
        piece = bytes(view[start : start + CHUNK_BYTES])
        yield Chunk(data=piece, last=start + CHUNK_BYTES >= end)


class Joiner:
    """Joins the chunks of successive messages."""

    def __init__(self, *, max_bytes: int = 1 << 40) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self.pending_bytes = 0
        """Bytes of an unfinished message; above 0 after the stream's end if it was cut off."""

    def add(self, chunk: Chunk) -> bytes | None:
        """Return the whole message at its last chunk, else None.

        Raises InvalidArgument for an oversized chunk, ResourceExhausted past `max_bytes`.
        """
        if len(chunk.data) > CHUNK_BYTES:
            raise InvalidArgument(f"chunk of {len(chunk.data)} bytes; at most {CHUNK_BYTES}")
        self.pending_bytes += len(chunk.data)
        if self.pending_bytes > self._max_bytes:
            raise ResourceExhausted(f"message exceeds {self._max_bytes} bytes")
        self._pieces.append(chunk.data)
        if not chunk.last:
            return None
        whole = b"".join(self._pieces)
        self._pieces, self.pending_bytes = [], 0
        return whole


def chunked(
    items: Iterable[Item], *, size_of: Callable[[Item], int], max_items: int = 0, max_bytes: int
) -> Iterator[list[Item]]:
    """Groups items in order, at most `max_items` (0: any number) and `max_bytes` together; a larger
    item is alone."""
    chunk: list[Item] = []
    chunk_bytes = 0
    for item in items:
        item_bytes = size_of(item)
        if chunk and (len(chunk) == max_items or chunk_bytes + item_bytes > max_bytes):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(item)
        chunk_bytes += item_bytes
    if chunk:
        yield chunk


def batched(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yield `size` items after the other; the last batch may have fewer."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
