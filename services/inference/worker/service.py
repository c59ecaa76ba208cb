"""The RPCs of a worker: decode, call the engine, encode.

The role prefill serves PrefillService, the role decode DecodeService, the role both serves both.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from forge.core.errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from forge.runtime.files.host_memory import place
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.routes import clipped
from forge.runtime.rpc.streams import flowing
from forge.runtime.rpc.tokens import split
from forge.runtime.telemetry import log
from forge.runtime.tracing import current_span
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference import codec, kv_codec
from services.inference.engines.base import (
    BrokenWeights,
    CacheReports,
    DecodeEngine,
    FetchKv,
    KvSpan,
    Piece,
    PrefillEngine,
    Prompt,
    RefusedHandOff,
    Tokens,
)
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.metrics import REFUSED_HAND_OFFS
from services.inference.engines.refusals import check_request
from services.inference.worker import shared_memory

MAX_PROMPT_ROUTE_BYTES = 2 << 20
"""Most experts of a prompt in the answer to Prefill, which is one message."""


class PrefillServicer(rpc.PrefillServiceServicer):
    """The RPCs of a prefill worker."""

    def __init__(
        self, engine: PrefillEngine, *, on_broken: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`on_broken` observes each prompt whose first log-prob is not finite."""
        self._engine = engine
        self._on_broken = on_broken

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        """Read a prompt and hold its keys and values."""
        if not request.request_id:
            raise InvalidArgument("request_id is empty")
        if not request.hold_s > 0:
            raise InvalidArgument(f"hold_s = {request.hold_s}: must be above 0")
        prompt = codec.read_prompt(request, self._engine.limits, seed=secrets.randbits(64))
        check_request(prompt, self._engine.capabilities)
        try:
            read = await self._engine.prefill(prompt, hold_s=request.hold_s)
        except BrokenWeights:
            if self._on_broken is not None:
                await self._on_broken()
            raise
        current_span().set(
            {"gen_ai.usage.input_tokens": prompt.tokens, "forge.cached_tokens": read.cached_tokens}
        )
        first = _with_shares(read.first, prompt, self._engine.capabilities)
        return pb.PrefillResponse(
            first=codec.write_tokens(_with_last_routes(first)),
            cached_tokens=read.cached_tokens,
            queue_s=read.queue_s,
            prefill_s=read.prefill_s,
            stored_tokens=read.stored_tokens,
            stored_s=read.stored_s,
        )

    async def FetchKv(
        self, request: pb.FetchKvRequest, context: Any
    ) -> AsyncIterator[pb.FetchKvResponse]:
        """Send the keys and values of a held prompt."""
        span = await self._engine.fetch_kv(request.request_id, from_token=request.from_token)
        shared = await _shared(span, request)
        if shared is not None:
            yield shared
        else:
            for response in codec.write_span(span, slices=request.slices):
                yield response
        if request.release:
            self._engine.release(request.request_id)

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: Any) -> pb.ReleaseKvResponse:
        """Drop a held prompt."""
        self._engine.release(request.request_id)
        return pb.ReleaseKvResponse()


async def _shared(span: KvSpan, request: pb.FetchKvRequest) -> pb.FetchKvResponse | None:
    """Put a span into the memory that the caller shares; None if it shares none, or it is full."""
    if len(span.data) < shared_memory.LEAST_BYTES or not request.shared_memory:
        return None
    if request.shared_memory != place():
        return None
    try:
        name, checksum = await asyncio.to_thread(shared_memory.write, span.data)
    except OSError as error:
        log.warning("shared_memory_not_written", bytes=len(span.data), error=str(error))
        return None
    return kv_codec.write_shared_span(span, name=name, checksum=checksum)


class CacheServicer(rpc.CacheServiceServicer):
    """The prefix cache of a worker, for routers."""

    def __init__(self, reports: CacheReports) -> None:
        self._reports = reports

    async def WatchCache(
        self, request: pb.WatchCacheRequest, context: Any
    ) -> AsyncIterator[pb.WatchCacheResponse]:
        """Send the content of the cache, then its changes."""
        numbers = count()
        async with aclosing(self._reports.changes()) as changes:
            async for change in changes:
                for response in kv_codec.write_cache_change(change):
                    response.sequence = next(numbers)
                    yield response


@dataclass(slots=True)
class _Fetched:
    """What came from another worker for one request."""

    tokens: int = 0
    seconds: float = 0.0


class DecodeServicer(rpc.DecodeServiceServicer):
    """The RPC of a decode worker."""

    def __init__(
        self,
        engine: DecodeEngine,
        channels: Channels,
        *,
        silence_s: float,
        local: PrefillEngine | None = None,
        on_broken: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`local`: this process's own engine of the role prefill, if it has one; `on_broken`
        observes each answer that ends with a log-prob that is not finite."""
        self._engine = engine
        self._channels = channels
        self._silence_s = silence_s
        self._local = local
        self._on_broken = on_broken
        self._shared_memory = place()

    async def Decode(
        self, request: pb.DecodeRequest, context: Any
    ) -> AsyncIterator[pb.DecodeResponse]:
        """Fetch the keys and values, then sample."""
        prompt = codec.read_prompt(request, self._engine.limits, seed=secrets.randbits(64))
        check_request(prompt, self._engine.capabilities)
        first = codec.read_tokens(request.first)
        if len(first.ids) != 1:
            raise InvalidArgument(f"first has {len(first.ids)} tokens; prefill samples exactly one")
        fetched = _Fetched()
        fetch = self._fetch_from(request, fetched)
        pieces = self._engine.decode(prompt, first, fetch, stream=request.stream)
        async with aclosing(pieces):
            async for piece in self._observed(pieces):
                tokens = _with_shares(piece.tokens, prompt, self._engine.capabilities)
                if piece.finish:
                    current_span().set(
                        {"forge.queue_s": piece.queue_s, "forge.decode_s": piece.decode_s}
                    )
                written = codec.write_tokens(tokens)
                *parts, last = split(written) if written.routed_experts.ids else [written]
                for part in parts:
                    yield pb.DecodeResponse(tokens=part)
                yield pb.DecodeResponse(
                    tokens=last,
                    finish_reason=codec.write_finish(piece.finish),
                    queue_s=piece.queue_s,
                    decode_s=piece.decode_s,
                    fetched_tokens=fetched.tokens if piece.finish else 0,
                    fetch_s=fetched.seconds if piece.finish else 0.0,
                )

    async def _observed(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        try:
            async for piece in pieces:
                yield piece
        except BrokenWeights:
            if self._on_broken is not None:
                await self._on_broken()
            raise

    def _fetch_from(self, request: pb.DecodeRequest, fetched: _Fetched) -> FetchKv:
        address = request.prefill_address

        async def fetch(from_token: int) -> KvSpan:
            if self._local is not None:
                with suppress(NotFound):
                    held = await self._local.fetch_kv(request.request_id, from_token=from_token)
                    self._local.release(request.request_id)
                    return held
            stub = rpc.PrefillServiceStub(self._channels.get(address))
            assembler, began_s = codec.SpanAssembler(), time.monotonic()
            call: Any = stub.FetchKv(
                pb.FetchKvRequest(
                    request_id=request.request_id,
                    from_token=from_token,
                    release=True,
                    slices=True,
                    shared_memory=self._shared_memory,
                    session_id=request.session_id,
                )
            )
            try:
                async for response in flowing(
                    call, silence_s=self._silence_s, source=f"prefill instance {address}"
                ):
                    shared = response.HasField("shared")
                    span = await self._read_shared(response) if shared else assembler.add(response)
                    if span is not None:
                        fetched.tokens = span.tokens
                        fetched.seconds = time.monotonic() - began_s
                        return span
            except DeadlineExceeded as error:
                raise Unavailable(str(error)) from error
            except DataLoss as error:
                REFUSED_HAND_OFFS.labels("damaged").inc()
                raise RefusedHandOff(f"hand-off from {address}: {error}") from error
            finally:
                call.cancel()
            raise Unavailable(f"{address} ended its stream before the last keys and values")

        return fetch

    async def _read_shared(self, response: pb.FetchKvResponse) -> KvSpan:
        """Map a span in shared memory. Raises DataLoss, Unavailable if it cannot be opened."""
        shared = response.shared
        try:
            data = await asyncio.to_thread(
                shared_memory.read, shared.name, size=shared.bytes, checksum=shared.xxh3_64
            )
        except OSError as error:
            # The next attempts go without it.
            self._shared_memory = ""
            raise Unavailable(f"shared memory {shared.name}: {error}") from error
        return kv_codec.read_shared_span(response, data)


def _with_last_routes(tokens: Tokens) -> Tokens:
    """The tokens, with the experts of as many tokens of the prompt, the last ones, as one message
    holds."""
    span = tokens.routes
    if span is None:
        return tokens
    kept = clipped(span, start=0, end=span.end, most_bytes=MAX_PROMPT_ROUTE_BYTES)
    return replace(tokens, routes=kept)


def _with_shares(tokens: Tokens, prompt: Prompt, able: Capabilities) -> Tokens:
    """The tokens; NaN stands for each share that the engine does not compute, so that training
    leaves the turn out instead of using it without its correction."""
    if able.shares or not prompt.sampling.reshapes:
        return tokens
    return replace(tokens, allowed=(math.nan,) * len(tokens.ids))
