"""Reads of the KV store for the role prefill: on threads, and for as long as a prompt may wait.

A file system that hangs costs a few prompts a few seconds: the store rests until its reads return.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from forge.runtime.telemetry import log
from services.inference.engines.base import Prompt
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.stored_kv import StoredKv, StoredPrefix

WAIT_S = 5.0
"""Longest time that a prompt waits for the store; then the tokens that it lacks are computed."""
_THREADS = 4


class StoredReads:
    """On the event loop."""

    def __init__(
        self, stored: StoredKv, shape: KvShape, *, cached_tokens: Callable[[bytes], int]
    ) -> None:
        """`cached_tokens` of ids, from any thread: those need no read."""
        self._stored = stored
        self._shape = shape
        self._cached_tokens = cached_tokens
        self._free = asyncio.Semaphore(_THREADS)
        self._late: set[asyncio.Event] = set()
        """Ends of the reads for which no prompt waits any more."""
        self._prompts: dict[bytes, asyncio.Event] = {}
        """By ids; set when the store has been read."""

    @asynccontextmanager
    async def during(self, prompt: Prompt) -> AsyncIterator[StoredPrefix | None]:
        """Around the computation of a prompt; yields its stored blocks. None while an equal prompt
        is computed, which has them."""
        equal = self._prompts.get(prompt.ids)
        if equal is not None:
            await equal.wait()
            yield None
            return
        self._prompts[prompt.ids] = was_read = asyncio.Event()
        try:
            try:
                found = await self._read(prompt)
            finally:
                was_read.set()
            yield found
        finally:
            del self._prompts[prompt.ids]

    async def _read(self, prompt: Prompt) -> StoredPrefix | None:
        if self._late:
            return None
        began_s = time.monotonic()
        found = StoredPrefix(self._shape, prompt.tokens)
        ended = asyncio.Event()
        try:
            async with asyncio.timeout(WAIT_S):
                await self._free.acquire()
                self._start(prompt, found, ended)
                try:
                    await ended.wait()
                finally:
                    if not ended.is_set():
                        self._late.add(ended)
        except TimeoutError:
            log.warning("kv_store_late", waited_s=WAIT_S, read_tokens=found.end - found.start)
        finally:
            if not ended.is_set():
                # Not on the event loop: the thread may be copying a block.
                await asyncio.shield(asyncio.to_thread(found.take))
        found.seconds = time.monotonic() - began_s
        return found

    def _start(self, prompt: Prompt, found: StoredPrefix, ended: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._free.release()
            self._late.discard(ended)
            ended.set()

        def read() -> None:
            try:
                start = self._cached_tokens(prompt.ids)
                self._stored.read(
                    prompt.ids, found, from_token=start, limit_tokens=prompt.tokens - 1
                )
            except Exception as error:
                # The store is a cache: the worker serves without it.
                log.error("kv_store_failed", error=str(error), exc_info=True)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end)

        # Not of a pool: the interpreter would wait for a thread that hangs.
        try:
            threading.Thread(target=read, name="kv-store-read", daemon=True).start()
        except RuntimeError as error:  # the host has no more threads
            log.warning("kv_store_not_read", error=str(error))
            end()
