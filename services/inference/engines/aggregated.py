"""The role both of an engine that reads and samples in one call.

The router makes two calls for a request: prefill returns the first token, decode the others. An
aggregated engine has one stream for both; between the calls it is held here. A decode call without
a held stream reads prompt and first token again: another worker read it, or its time was over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

from forge.core.errors import InvalidArgument, NotFound
from forge.core.named_tensor import NamedTensor
from forge.core.token_columns import int32_bytes
from services.inference.engines.base import (
    AggregatedEngine,
    CacheReports,
    EngineStatus,
    FetchKv,
    KvSpan,
    Piece,
    Prefilled,
    Probe,
    Prompt,
    RefusedHandOff,
    Tokens,
)
from services.inference.engines.refusals import lacking, refusal, rest_of


@dataclass(slots=True, kw_only=True)
class _Held:
    """A request between its two calls."""

    pieces: AsyncGenerator[Piece, None]
    rest: Piece
    """Tokens of the first piece after its first token."""
    expiry: asyncio.TimerHandle


class Served:
    """Common part of all roles of an `AggregatedEngine`, without requests: the contract's
    `Engine`."""

    def __init__(self, engine: AggregatedEngine) -> None:
        self.limits = engine.limits
        self.capabilities = engine.capabilities
        self.capacity = engine.capacity
        reports: CacheReports | None = getattr(engine, "cache_reports", None)
        if reports is not None:
            self.cache_reports = reports
        self._served = engine
        self._unfinished = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def cache_tokens(self) -> int:
        """See `Engine`."""
        return self._served.cache_tokens

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None:
        """See `Engine`."""
        await self._served.load(tensors, version=version, probe=probe)

    def status(self) -> EngineStatus:
        """See `Engine`."""
        return EngineStatus(version=self._served.version, running=self._unfinished)

    async def idle(self) -> None:
        """See `Engine`."""
        await self._idle.wait()

    def count(self, change: int) -> None:
        """Count requests, and prompts that are held, until they end."""
        self._unfinished += change
        if self._unfinished:
            self._idle.clear()
        else:
            self._idle.set()


class Aggregated(Served):
    """A `BothEngine` on an `AggregatedEngine`. Keys and values never leave the engine."""

    stored_tokens = 0

    def __init__(self, engine: AggregatedEngine) -> None:
        super().__init__(engine)
        self.engine = engine
        self._held: dict[str, _Held] = {}
        self._reading: set[str] = set()
        self._ends: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Abort all held requests and stop the engine."""
        for request_id in list(self._held):
            self.release(request_id)
        await asyncio.gather(*self._ends)
        await self.engine.close()

    async def prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        """See `PrefillEngine`. The engine samples on while the request is held. Raises
        InvalidArgument for the id of another request that is read or held."""
        if prompt.request_id in self._held or prompt.request_id in self._reading:
            raise InvalidArgument(f"request_id = {prompt.request_id!r} is that of another request")
        self._reading.add(prompt.request_id)
        try:
            return await self._prefill(prompt, hold_s=hold_s)
        finally:
            self._reading.discard(prompt.request_id)

    async def _prefill(self, prompt: Prompt, *, hold_s: float) -> Prefilled:
        began_s = time.monotonic()
        pieces = self._counted(prompt)
        try:
            first = await anext(pieces)
        except BaseException:
            await pieces.aclose()
            raise
        loop = asyncio.get_running_loop()
        rest, routes = part(first.tokens, 1, None), first.tokens.routes
        # The router makes no decode call behind a token that ends the answer.
        ends = first.finish is not None and not rest.ids
        self._held[prompt.request_id] = _Held(
            pieces=pieces,
            rest=replace(first, tokens=replace(rest, routes=None if ends else routes)),
            expiry=loop.call_later(hold_s, self.release, prompt.request_id),
        )
        return Prefilled(
            first=replace(part(first.tokens, 0, 1), routes=routes if ends else None),
            cached_tokens=first.cached_tokens,
            queue_s=first.queue_s,
            prefill_s=max(0.0, time.monotonic() - began_s - first.queue_s),
        )

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        """Raises NotFound: keys and values stay in the engine."""
        raise NotFound(
            f"the engine {self.capabilities.engine} hands over no keys and values; "
            f"request {request_id} is sampled where it was read"
        )

    def release(self, request_id: str) -> None:
        """See `PrefillEngine`; aborts the request."""
        held = self._held.pop(request_id, None)
        if held is not None:
            held.expiry.cancel()
            end = asyncio.ensure_future(held.pieces.aclose())
            self._ends.add(end)
            end.add_done_callback(self._ends.discard)

    async def decode(
        self, prompt: Prompt, first: Tokens, fetch_kv: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        """See `DecodeEngine`."""
        held = self._held.pop(prompt.request_id, None)
        if held is not None:
            held.expiry.cancel()
        began_s = time.monotonic()
        pieces = self._read_again(prompt, first) if held is None else held.pieces
        unsent = Tokens() if held is None else held.rest.tokens
        finish = None if held is None else held.rest.finish
        async with aclosing(pieces):
            while finish is None:
                if stream and unsent.ids:
                    yield Piece(tokens=unsent)
                    unsent = Tokens()
                piece = await anext(pieces)
                finish, unsent = piece.finish, joined(unsent, piece.tokens)
            yield Piece(tokens=unsent, finish=finish, decode_s=time.monotonic() - began_s)

    def _read_again(self, prompt: Prompt, first: Tokens) -> AsyncGenerator[Piece, None]:
        """Sample behind `first` in a new stream. Raises RefusedHandOff where the engine cannot
        continue such an answer."""
        sampling = rest_of(prompt.sampling, len(first.ids))
        if lacking(sampling, self.capabilities):
            raise RefusedHandOff(
                f"request {prompt.request_id} is no longer held here: "
                f"{refusal(sampling, self.capabilities)}"
            )
        ids = prompt.ids + int32_bytes(first.ids)
        return self._counted(replace(prompt, ids=ids, sampling=sampling))

    async def _counted(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        """Yield the engine's pieces; count the request until they end."""
        self.count(1)
        try:
            async with aclosing(self.engine.generate(prompt)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self.count(-1)


def part(tokens: Tokens, start: int, end: int | None) -> Tokens:
    """Return some of the tokens, without their experts."""
    return Tokens(
        ids=tokens.ids[start:end],
        logprobs=tokens.logprobs[start:end],
        versions=tokens.versions[start:end],
        allowed=tokens.allowed[start:end],
        top=tokens.top[start:end],
    )


def joined(one: Tokens, other: Tokens) -> Tokens:
    """Return the tokens of both; the engine returns experts once, with its last piece."""
    return Tokens(
        ids=one.ids + other.ids,
        logprobs=one.logprobs + other.logprobs,
        versions=one.versions + other.versions,
        allowed=one.allowed + other.allowed,
        top=one.top + other.top,
        routes=other.routes or one.routes,
    )
