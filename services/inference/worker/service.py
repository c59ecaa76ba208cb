"""The RPCs of a worker: decode, call the engine, encode.

The role prefill serves PrefillService, the role decode DecodeService, the role both serves both.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any, cast

from forge.core.errors import FailedPrecondition, InvalidArgument
from forge.runtime.files.host_memory import place
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.routes import clipped
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
    EarlyDecodeEngine,
    EarlyPrefillEngine,
    Finish,
    KvSpan,
    ModelLimits,
    Prefilled,
    PrefillEngine,
    Prompt,
    Tokens,
)
from services.inference.engines.capabilities import EARLY_HAND_OFF, Capabilities
from services.inference.engines.refusals import check_request
from services.inference.worker import shared_memory
from services.inference.worker.broken_answers import BrokenOutput, check_ids
from services.inference.worker.kv_fetch import KvFetcher

MAX_PROMPT_ROUTE_BYTES = 2 << 20
"""Most experts of a prompt in the answer to Prefill, which is one message."""

_OWN_HOLD_S = 3600.0
"""Longest time from a prompt's read to its decode in the same call; its end releases the prompt."""


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
        prompt = codec.read_prompt(request, self._engine.limits)
        check_request(prompt, self._engine.capabilities)
        try:
            read = await self._engine.prefill(prompt, hold_s=request.hold_s)
        except BrokenWeights:
            if self._on_broken is not None:
                await self._on_broken()
            raise
        try:
            return _prefilled(read, prompt, self._engine)
        except BrokenOutput:
            self._engine.release(request.request_id)
            raise

    async def FetchKv(
        self, request: pb.FetchKvRequest, context: Any
    ) -> AsyncIterator[pb.FetchKvResponse]:
        """Send the keys and values of a held prompt; early, of one that is still computed."""
        is_complete = False
        try:
            async with aclosing(self._spans(request)) as spans:
                async for span, is_last in spans:
                    if span is None:
                        yield pb.FetchKvResponse()
                        continue
                    async with aclosing(_sent(span, request)) as responses:
                        async for response in responses:
                            is_complete = is_last and kv_codec.ends_span(response)
                            yield response
        finally:
            # Also if the caller, who has all, has ended the call before its end here.
            if request.release and is_complete:
                self._engine.release(request.request_id)

    async def _spans(
        self, request: pb.FetchKvRequest
    ) -> AsyncGenerator[tuple[KvSpan | None, bool], None]:
        """Yield the spans, and whether each is the last."""
        if request.early:
            async with aclosing(self._early(request)) as spans:
                async for span in spans:
                    yield span, span is not None and span.first is not None
            return
        yield await self._engine.fetch_kv(request.request_id, from_token=request.from_token), True

    def _early(self, request: pb.FetchKvRequest) -> AsyncGenerator[KvSpan | None, None]:
        require_early(self._engine.capabilities)
        engine = cast(EarlyPrefillEngine, self._engine)
        return engine.early_kv(request.request_id, from_token=request.from_token)

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: Any) -> pb.ReleaseKvResponse:
        """Drop a held prompt."""
        self.release(request.request_id)
        return pb.ReleaseKvResponse()

    def release(self, request_id: str) -> None:
        """Drop a held prompt; an unknown id changes nothing."""
        self._engine.release(request_id)


def _prefilled(read: Prefilled, prompt: Prompt, engine: PrefillEngine) -> pb.PrefillResponse:
    current_span().set(
        {"gen_ai.usage.input_tokens": prompt.tokens, "forge.cached_tokens": read.cached_tokens}
    )
    first = _checked(read.first, prompt, engine.limits, engine.capabilities)
    return pb.PrefillResponse(
        first=codec.write_tokens(_with_last_routes(first)),
        cached_tokens=read.cached_tokens,
        queue_s=read.queue_s,
        prefill_s=read.prefill_s,
        stored_tokens=read.stored_tokens,
        stored_s=read.stored_s,
    )


def require_early(able: Capabilities) -> None:
    """Raises InvalidArgument on an engine without early hand-offs."""
    if EARLY_HAND_OFF not in able.hand_offs:
        raise InvalidArgument(f"early = true: the engine {able.engine} has no early hand-offs")


async def _sent(
    span: KvSpan, request: pb.FetchKvRequest
) -> AsyncGenerator[pb.FetchKvResponse, None]:
    """Yield the responses with a span. Raises FailedPrecondition before the first for another model
    or version than the caller's."""
    if span.fingerprint and request.model_fingerprint not in (b"", span.fingerprint):
        raise FailedPrecondition("the keys and values are of another model than the caller's")
    if request.prefix_version not in (0, span.version):
        raise FailedPrecondition(
            f"the keys and values are of weights {span.version}; the caller has those before token "
            f"{request.from_token} of weights {request.prefix_version}"
        )
    for response in kv_codec.write_prompt_end(span, request):
        yield response
    shared = await _shared(span, request)
    if shared is not None:
        try:
            yield shared
        except BaseException:
            # The caller has left, perhaps before it opened the file.
            shared_memory.remove(shared.shared.name)
            raise
        return
    for response in kv_codec.write_span(span, slices=request.slices):
        yield response


async def _shared(span: KvSpan, request: pb.FetchKvRequest) -> pb.FetchKvResponse | None:
    """Put a span into the memory that the caller shares; None if it shares none, or it is full."""
    if len(span.data) < shared_memory.LEAST_BYTES or not request.shared_memory:
        return None
    if request.shared_memory != place():
        return None
    writing = asyncio.create_task(asyncio.to_thread(shared_memory.write, span.data))
    try:
        name, checksum = await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(_remove_written)
        raise
    except OSError as error:
        log.warning("shared_memory_not_written", bytes=len(span.data), error=str(error))
        return None
    return kv_codec.write_shared_span(span, name=name, checksum=checksum)


def _remove_written(writing: asyncio.Task[tuple[str, int]]) -> None:
    """Remove a file whose caller has left."""
    if not writing.cancelled() and writing.exception() is None:
        shared_memory.remove(writing.result()[0])


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


class DecodeServicer(rpc.DecodeServiceServicer):
    """The RPC of a decode worker."""

    def __init__(
        self,
        engine: DecodeEngine,
        channels: Channels,
        *,
        silence_s: float,
        landing_bytes: int = 0,
        local: PrefillEngine | None = None,
        on_broken: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`landing_bytes`: memory for prompts that arrive while they are computed; `local`: this
        process's own engine of the role prefill, if it has one; `on_broken` observes each answer
        that ends with a log-prob that is not finite."""
        self._engine = engine
        self._local = local
        self._on_broken = on_broken
        self.fetcher = KvFetcher(
            engine, channels, silence_s=silence_s, landing_bytes=landing_bytes, local=local
        )

    async def Decode(
        self, request: pb.DecodeRequest, context: Any
    ) -> AsyncIterator[pb.DecodeResponse]:
        """Fetch the keys and values, then sample; with `prefill` read the prompt before."""
        async with aclosing(self.answer(request)) as responses:
            async for response in responses:
                yield response

    async def answer(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeResponse, None]:
        """Yield the responses to a Decode."""
        prompt = codec.read_prompt(request, self._engine.limits)
        check_request(prompt, self._engine.capabilities)
        if request.prefill:
            responses = self._prefill_and_decode(request, prompt)
        else:
            responses = self._decode(request, prompt, self._first(request))
        try:
            async with aclosing(responses):
                async for response in responses:
                    yield response
        except BrokenWeights:
            if self._on_broken is not None:
                await self._on_broken()
            raise

    async def _prefill_and_decode(
        self, request: pb.DecodeRequest, prompt: Prompt
    ) -> AsyncGenerator[pb.DecodeResponse, None]:
        """Read a prompt with this process's own engine, then sample."""
        if self._local is None:
            raise InvalidArgument("prefill = true: this worker does not have the role both")
        if not request.request_id:
            raise InvalidArgument("request_id is empty")
        try:
            read = await self._local.prefill(prompt, hold_s=_OWN_HOLD_S)
            finish = finish_with(read.first, prompt, self._engine.limits)
            yield pb.DecodeResponse(
                prefilled=_prefilled(read, prompt, self._local),
                finish_reason=codec.write_finish(finish),
            )
            if finish is None:
                async with aclosing(self._decode(request, prompt, read.first)) as responses:
                    async for response in responses:
                        yield response
        finally:
            self._local.release(request.request_id)

    async def _decode(
        self, request: pb.DecodeRequest, prompt: Prompt, first: Tokens | None
    ) -> AsyncGenerator[pb.DecodeResponse, None]:
        fetch = self.fetcher.fetch(request, to_token=prompt.tokens)
        limits, able = self._engine.limits, self._engine.capabilities
        # Without `first` it has been found to be one.
        engine = cast(EarlyDecodeEngine, self._engine)
        async with aclosing(engine.decode(prompt, first, fetch, stream=request.stream)) as pieces:
            async for piece in pieces:
                tokens = _checked(piece.tokens, prompt, limits, able)
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
                    fetched_tokens=fetch.tokens if piece.finish else 0,
                    fetch_s=fetch.seconds if piece.finish else 0.0,
                )

    def _first(self, request: pb.DecodeRequest) -> Tokens | None:
        """Return the token of prefill; None while the prompt is computed."""
        if request.early:
            require_early(self._engine.capabilities)
            return None
        first = codec.read_tokens(request.first)
        if len(first.ids) != 1:
            raise InvalidArgument(f"first has {len(first.ids)} tokens; prefill samples exactly one")
        likeliest = [token for top in first.top for token, _ in top]
        codec.check_tokens("first", [*first.ids, *likeliest], self._engine.limits)
        return first


def finish_with(first: Tokens, prompt: Prompt, limits: ModelLimits) -> Finish | None:
    """Return why the first token ends the answer; None if it does not."""
    if first.ids[-1] in prompt.sampling.stop_ids:
        return Finish.STOP
    most_tokens = min(prompt.sampling.max_tokens, limits.context_tokens - prompt.tokens)
    return Finish.LENGTH if most_tokens < 2 else None


def _with_last_routes(tokens: Tokens) -> Tokens:
    """The tokens, with the experts of as many tokens of the prompt, the last ones, as one message
    holds."""
    span = tokens.routes
    if span is None:
        return tokens
    kept = clipped(span, start=0, end=span.end, most_bytes=MAX_PROMPT_ROUTE_BYTES)
    return replace(tokens, routes=kept)


def _checked(tokens: Tokens, prompt: Prompt, limits: ModelLimits, able: Capabilities) -> Tokens:
    """The tokens; NaN stands for each share that the engine does not compute, so that training
    leaves the turn out instead of using it without its correction. Raises BrokenOutput."""
    check_ids(tokens, limits.vocabulary, engine=able.engine)
    if able.shares or not prompt.sampling.reshapes:
        return tokens
    return replace(tokens, allowed=(math.nan,) * len(tokens.ids))
