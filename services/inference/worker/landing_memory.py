"""Keys and values that arrive, in memory that is bounded; those in blocks are joined.

Owns the memory of one decode worker for prompts that arrive. A block that has no room is not read,
so that its sender waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forge.core.errors import ResourceExhausted
from services.inference.engines.base import KvSpan, RefusedHandOff
from services.inference.engines.metrics import REFUSED_HAND_OFFS
from services.inference.worker.metrics import LANDING_BYTES

_INLINE_BYTES = 1 << 18
"""Blocks up to this size are copied on the event loop."""
_RETRY_AFTER_S = 0.5


class LandingRoom:
    """At most `capacity_bytes` of prompts on their way, or one prompt; granted in order."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    async def take(self, needed_bytes: int) -> None:
        """Wait for memory.

        A prompt asks with its first block, so it has its memory at the sender already and needs
        none that waits for this one: each wait ends.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((needed_bytes, granted))
        self._advance()
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.give(needed_bytes)
            self._advance()
            raise

    @asynccontextmanager
    async def taken(self, needed_bytes: int) -> AsyncIterator[None]:
        """Around the use of memory, once there is some."""
        await self.take(needed_bytes)
        try:
            yield
        finally:
            self.give(needed_bytes)

    def give(self, freed_bytes: int) -> None:
        """Give memory back."""
        self.used_bytes -= freed_bytes
        LANDING_BYTES.dec(freed_bytes)
        self._advance()

    def _advance(self) -> None:
        while self._line:
            needed_bytes, granted = self._line[0]
            # Done: its caller has left.
            if not granted.done():
                if self.used_bytes and self.used_bytes + needed_bytes > self._capacity_bytes:
                    return
                self.used_bytes += needed_bytes
                LANDING_BYTES.inc(needed_bytes)
                granted.set_result(None)
            self._line.popleft()


class Landing:
    """Joins the blocks of one prompt, from one token to another."""

    def __init__(self, room: LandingRoom, *, from_token: int, to_token: int) -> None:
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
            REFUSED_HAND_OFFS.labels("place").inc()
            raise RefusedHandOff(
                f"a block of the hand-off has the tokens {place[0]} to {place[1]}; {self._next} to "
                f"{self._end} are missing"
            )
        if _kind(block) != _kind(first) or block.version != first.version:
            REFUSED_HAND_OFFS.labels("shape").inc()
            raise RefusedHandOff(
                f"a block of the hand-off is {_kind(block)} of version {block.version}; those "
                f"before it are {_kind(first)} of version {first.version}"
            )
        if len(block.shape) != 5 or block.shape[3] != block.tokens:
            REFUSED_HAND_OFFS.labels("shape").inc()
            raise RefusedHandOff(
                f"a block of the hand-off with {block.tokens} tokens has the shape "
                f"{list(block.shape)}"
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
        REFUSED_HAND_OFFS.labels("shape").inc()
        raise RefusedHandOff(
            f"a block of the hand-off with {len(block.data)} bytes does not fill "
            f"{list(block.shape)}"
        )
    return outer, inner
