"""Results of requests: awaitable, and iterated while they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(slots=True)
class Logprob:
    """The log-prob of one token at one place."""

    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    """The answer so far: cumulative."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    disaggregated_params: Any = None


class GenerationResult:
    """One request; the executor's thread feeds it through the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_abort: Callable[[], None]) -> None:
        self.outputs = [CompletionOutput()]
        self._loop = loop
        self._on_abort = on_abort
        self._news: asyncio.Queue[CompletionOutput | Exception] = asyncio.Queue()
        self._done = False

    def feed(self, output: CompletionOutput | Exception) -> None:
        """Called by the executor's thread."""
        # The loop of a test may have closed.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._news.put_nowait, output)

    def abort(self) -> None:
        """Stop the request."""
        self._on_abort()

    async def _next(self) -> None:
        news = await self._news.get()
        if isinstance(news, Exception):
            self._done = True
            raise news
        self.outputs = [news]
        self._done = news.finish_reason is not None

    async def _finish(self) -> Self:
        while not self._done:
            await self._next()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._finish().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if self._done:
            raise StopAsyncIteration
        await self._next()
        return self
