"""Prompts that are still computed, for decode workers that fetch them early.

Owns no keys and values: they are the prefill's own, and stay where they are until it ends. A fetch
may come before its prefill, since both are under way at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from forge.core.errors import NotFound
from services.inference.engines.embedded.messages import HeldPrompt, PartRead

_ARRIVAL_S = 10.0
"""Longest time that a fetch waits for its prefill."""
_SILENCE_S = 5.0
"""Longest time without an answer to a fetch."""
_ENDED = 4096
"""Number of ended prefills whose late fetches fail at once."""


class EarlyRead:
    """Progress of one prompt."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._part: PartRead | None = None
        self._whole: HeldPrompt | None = None
        self._change = asyncio.Event()
        self.has_begun = False
        self.fetches = 0
        """Fetches that wait for the prefill."""
        self._has_ended = False

    def begin(self) -> None:
        """Note that the prefill is here."""
        self.has_begun = True
        self._wake()

    def advance(self, part: PartRead) -> None:
        """Note a pass."""
        self._part = part
        self._wake()

    def finish(self, whole: HeldPrompt) -> None:
        """Note the last pass."""
        self._whole = whole

    def end(self) -> None:
        """Note the end of the prefill, with or without a result."""
        self._has_ended = True
        self._wake()

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._change.wait()

    async def after(self, tokens: int) -> PartRead | HeldPrompt | None:
        """Wait until this many tokens, or all, are computed; None after some seconds. Raises
        NotFound at an end without a result."""
        try:
            async with asyncio.timeout(_SILENCE_S):
                while True:
                    if self._whole is not None:
                        return self._whole
                    if self._has_ended:
                        raise NotFound(f"the prefill of request {self._request_id} has failed")
                    if self._part is not None and self._part.tokens >= tokens:
                        return self._part
                    await self.changed()
        except TimeoutError:
            return None

    def _wake(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()


class EarlyReads:
    """All prompts that are computed or that a fetch waits for, by request."""

    def __init__(self) -> None:
        self._reads: dict[str, EarlyRead] = {}
        self._ended: dict[str, None] = {}
        """Requests whose prefill has ended, the oldest first. An id names one prefill."""

    def __len__(self) -> int:
        return len(self._reads)

    @contextmanager
    def during(self, request_id: str) -> Iterator[EarlyRead]:
        """Context manager of a prefill."""
        read = self._reads.setdefault(request_id, EarlyRead(request_id))
        self._ended.pop(request_id, None)
        read.begin()
        try:
            yield read
        finally:
            self._reads.pop(request_id, None)
            self._ended[request_id] = None
            if len(self._ended) > _ENDED:
                del self._ended[next(iter(self._ended))]
            read.end()

    async def find(self, request_id: str) -> EarlyRead:
        """Wait for the prefill of a prompt; return its progress. Raises NotFound if none comes, at
        once if it has ended."""
        if request_id in self._ended:
            raise NotFound(f"the prefill of request {request_id} has ended")
        read = self._reads.setdefault(request_id, EarlyRead(request_id))
        read.fetches += 1
        try:
            async with asyncio.timeout(_ARRIVAL_S):
                while not read.has_begun:
                    await read.changed()
        except TimeoutError:
            raise NotFound(f"no prefill of request {request_id} came") from None
        finally:
            read.fetches -= 1
            # Its prefill wakes all fetches: the last one removes it.
            if not read.has_begun and not read.fetches:
                self._reads.pop(request_id, None)
        return read
