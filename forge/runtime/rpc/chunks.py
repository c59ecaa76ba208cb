"""Chunks of at most 1 MiB for messages above gRPC's limit."""

from __future__ import annotations

from collections.abc import Iterator

from forge.core.errors import InvalidArgument, ResourceExhausted
from forge.v1.common_pb2 import Chunk

CHUNK_BYTES = 1 << 20


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
        self._bytes = 0

    def add(self, chunk: Chunk) -> bytes | None:
        """Return the whole message at its last chunk, else None.

        Raises InvalidArgument for an oversized chunk, ResourceExhausted past `max_bytes`.
        """
        if len(chunk.data) > CHUNK_BYTES:
            raise InvalidArgument(f"chunk of {len(chunk.data)} bytes; at most {CHUNK_BYTES}")
        self._bytes += len(chunk.data)
        if self._bytes > self._max_bytes:
            raise ResourceExhausted(f"message exceeds {self._max_bytes} bytes")
        self._pieces.append(chunk.data)
        if not chunk.last:
            return None
        whole = b"".join(self._pieces)
        self._pieces, self._bytes = [], 0
        return whole

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished message; above 0 after the stream's end if it was cut off."""
        return self._bytes
