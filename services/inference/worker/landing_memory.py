"""Keys and values that arrive, in memory that is bounded; those in blocks are joined.

A block that has no room is not read, so that its sender waits.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forge.core.errors import ResourceExhausted
from services.inference.engines.base import KvSpan
from services.inference.engines.byte_room import ByteRoom
from services.inference.engines.refusals import refused

_INLINE_BYTES = 1 << 18
"""Blocks up to this size are copied on the event loop."""
_RETRY_AFTER_S = 0.5


class Landing:
    """Joins the blocks of one prompt, from one token to another."""

    def __init__(self, room: ByteRoom, *, from_token: int, to_token: int) -> None:
        self._room = room
        self._start = self._next = from_token
        self._end = to_token
        self._first: KvSpan | None = None
        self._joined = np.empty((0, 0, 0), dtype=np.uint8)
        self._taken_bytes = 0

    async def add(self, block: KvSpan) -> KvSpan | None:
        """Return all tokens after the last block, else None. Raises RefusedHandOff for a block that
        does not continue the one before, or is of another shape or version, ResourceExhausted
        without memory for the prompt."""
        if self._first is None and block.tokens == self._end - self._start:
            return block
        self._check(block)
        outer, inner = _layout(block)
        if self._first is None:
            self._first = block
            needed_bytes = outer * inner * (self._end - self._start)
            # The prompt has its memory at the sender, and needs none that waits for this one: each
            # wait ends.
            await self._room.take(needed_bytes)
            self._taken_bytes = needed_bytes
            self._joined = self._allocated(outer, inner)
        if len(block.data) <= _INLINE_BYTES:
            self._copy(block)
        else:
            await asyncio.to_thread(self._copy, block)
        self._next += block.tokens
        if self._next < self._end:
            return None
        layers, two, heads, _, size = block.shape
        return replace(
            block,
            from_token=self._start,
            tokens=self._end - self._start,
            shape=(layers, two, heads, self._end - self._start, size),
            data=self._joined.data.cast("B"),
        )

    def close(self) -> None:
        """Give the memory back; the joined block is the caller's alone."""
        if self._taken_bytes:
            self._room.give(self._taken_bytes)
            self._taken_bytes = 0

    def _allocated(self, outer: int, inner: int) -> NDArray[np.uint8]:
        tokens = self._end - self._start
        try:
            return np.empty((outer, tokens, inner), dtype=np.uint8)
        except MemoryError as error:
            raise ResourceExhausted(
                f"there is no memory for a hand-off of {tokens} tokens: {error}",
                retry_after_s=_RETRY_AFTER_S,
            ) from error

    def _copy(self, block: KvSpan) -> None:
        outer, inner = _layout(block)
        rows = np.frombuffer(block.data, dtype=np.uint8).reshape(outer, block.tokens, inner)
        start = self._next - self._start
        self._joined[:, start : start + block.tokens] = rows

    def _check(self, block: KvSpan) -> None:
        first = self._first or block
        place = (block.from_token, block.from_token + block.tokens)
        if place[0] != self._next or not place[0] < place[1] <= self._end:
            raise refused(
                "place",
                f"a block of the hand-off has the tokens {place[0]} to {place[1]}; {self._next} to "
                f"{self._end} are missing",
            )
        if _kind(block) != _kind(first) or block.version != first.version:
            raise refused(
                "shape",
                f"a block of the hand-off is {_kind(block)} of version {block.version}; those "
                f"before it are {_kind(first)} of version {first.version}",
            )
        if len(block.shape) != 5 or block.shape[3] != block.tokens:
            raise refused(
                "shape",
                f"a block of the hand-off with {block.tokens} tokens has the shape "
                f"{list(block.shape)}",
            )


def _kind(block: KvSpan) -> tuple[object, ...]:
    _, inner = _layout(block)
    return (block.dtype, block.shape[:3], block.shape[4:], inner, block.fingerprint)


def _layout(block: KvSpan) -> tuple[int, int]:
    """Return the number of rows of tokens, and the bytes of one token in one. Raises RefusedHandOff
    for data that do not fill the shape."""
    outer = int(np.prod(block.shape[:3], dtype=np.int64))
    tokens = max(1, block.tokens)
    inner = len(block.data) // max(1, outer * tokens)
    if not outer or not inner or inner * outer * tokens != len(block.data):
        raise refused(
            "shape",
            f"a block of the hand-off with {len(block.data)} bytes does not fill "
            f"{list(block.shape)}",
        )
    return outer, inner
