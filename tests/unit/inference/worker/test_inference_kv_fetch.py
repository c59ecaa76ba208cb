"""Keys and values that a decode worker pulls from a prefill instance over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import Unavailable
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SampledTokens, SamplingParams
from services.inference import kv_codec
from services.inference.engines.base import KvSpan, OtherWeights, RefusedHandOff, Tokens
from services.inference.engines.capabilities import EARLY_HAND_OFF
from services.inference.worker.service import DecodeServicer, PrefillServicer
from tests.support.inference.fetching_engine import FetchingEngine
from tests.support.inference.weight_sources import SECURITY
from tests.support.runtime.waiting import LIMIT_S

DATA = bytes(range(256)) * 8192
SPAN = KvSpan(
    from_token=0, tokens=1, version=3, dtype="uint8", shape=(1, 2, 1, 1, 1 << 20), data=DATA
)


class Prefill(rpc.PrefillServiceServicer):
    """Sends the span, or so many messages of it and then nothing, or damages its last byte."""

    def __init__(
        self,
        span: KvSpan = SPAN,
        *,
        slices: bool = True,
        hangs_after: int | None = None,
        damages: bool = False,
    ) -> None:
        self._span = span
        self._slices = slices
        self._hangs_after = hangs_after
        self._damages = damages

    async def FetchKv(
        self, request: pb.FetchKvRequest, context: Any
    ) -> AsyncIterator[pb.FetchKvResponse]:
        assert request.slices
        end = kv_codec.write_prompt_end(self._span, request)
        blocks = kv_codec.write_span(self._span, slices=self._slices)
        for sent, response in enumerate([*end, *blocks]):
            if sent == self._hangs_after:
                await asyncio.Event().wait()
            if self._damages and sent == 1:
                response.slice.data = response.slice.data[:-1] + b"?"
            yield response


class Together(Prefill):
    """Sends to no caller before all are there."""

    def __init__(self, callers: int) -> None:
        super().__init__()
        self._barrier = asyncio.Barrier(callers)

    async def FetchKv(
        self, request: pb.FetchKvRequest, context: Any
    ) -> AsyncIterator[pb.FetchKvResponse]:
        await self._barrier.wait()
        async for response in super().FetchKv(request, context):
            yield response


async def fetched_from(
    prefill: Prefill, *, records: bool = False, callers: int = 1, landing_bytes: int = 0
) -> KvSpan | None:
    """What a decode worker gets of that prefill instance, for so many callers at once; `records`:
    it keeps experts."""
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(
        rpc.add_PrefillServiceServicer_to_server, prefill, full_name="forge.v1.PrefillService"
    )
    channels, engine = Channels(SECURITY), FetchingEngine(records=records)
    token = (1).to_bytes(4, "little")
    request = pb.DecodeRequest(
        request_id="r",
        prompt_ids=token,
        sampling=SamplingParams(max_tokens=1),
        prefill_address=await server.start(),
        first=SampledTokens(ids=token, logprobs=bytes(4), weight_versions=token),
    )
    try:
        decode = DecodeServicer(
            cast(Any, engine), channels, silence_s=LIMIT_S if callers > 1 else 1.0,
            landing_bytes=landing_bytes,
        )  # fmt: skip

        async def call() -> None:
            async for _ in decode.Decode(request, None):
                pass

        await asyncio.gather(*(call() for _ in range(callers)))
        assert decode.fetcher.whole_room.used_bytes == 0
        return engine.fetched
    finally:
        await channels.close()
        await server.stop(grace_s=0)


@pytest.mark.parametrize("slices", [True, False])
async def test_kv_hand_off_arrives_whole(slices: bool) -> None:
    """In slices, and from an instance of an earlier release in chunks."""
    assert await fetched_from(Prefill(slices=slices)) == SPAN


@pytest.mark.parametrize(("landing_bytes", "most"), [(0, 1), (5 << 20, 2)])
async def test_whole_hand_offs_arrive_in_bounded_memory(
    monkeypatch: pytest.MonkeyPatch, landing_bytes: int, most: int
) -> None:
    """Of 2 MiB each: no more at a time than have room, but one in any case."""
    arriving: set[kv_codec.SpanAssembler] = set()
    peak = 0

    class Noted(kv_codec.SpanAssembler):
        def add(self, response: pb.FetchKvResponse) -> KvSpan | None:
            nonlocal peak
            arriving.add(self)
            peak = max(peak, len(arriving))
            span = super().add(response)
            if span is not None:
                arriving.discard(self)
            return span

    monkeypatch.setattr(kv_codec, "SpanAssembler", Noted)
    assert await fetched_from(Together(4), callers=4, landing_bytes=landing_bytes) == SPAN
    assert 1 <= peak <= most


@pytest.mark.parametrize("records", [True, False])
async def test_experts_of_the_prompt_arrive_with_it(records: bool) -> None:
    """At a worker that keeps them in its prefix cache; no other one asks for them."""
    span = replace(SPAN, routes=bytes(range(96)))
    arrived = await fetched_from(Prefill(span), records=records)
    assert arrived == (span if records else SPAN)


class Holding:
    """A prefill engine with one prompt, which comes early in two blocks."""

    capabilities = replace(FetchingEngine.capabilities, hand_offs=frozenset({EARLY_HAND_OFF}))

    def __init__(self) -> None:
        self.released: list[str] = []

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        return SPAN

    async def early_kv(
        self, request_id: str, *, from_token: int
    ) -> AsyncGenerator[KvSpan | None, None]:
        yield SPAN
        yield None
        yield replace(SPAN, first=Tokens(ids=(1,), logprobs=(-1.0,), versions=(3,)))

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


async def test_own_prompt_of_other_weights_continues_no_cached_prefix() -> None:
    """A worker of the role both reads it before a swap, and caches the prefix after it: it gets the
    whole prompt, and meanwhile keeps it."""
    engine, local = FetchingEngine(), Holding()
    decode = DecodeServicer(
        cast(Any, engine), Channels(SECURITY), silence_s=1.0, local=cast(Any, local)
    )
    fetch = decode.fetcher.fetch(pb.DecodeRequest(request_id="r", prefill=True), to_token=2)
    engine.version = SPAN.version + 1
    with pytest.raises(OtherWeights):
        await fetch(1)
    assert not local.released
    assert await fetch(0) == SPAN
    assert local.released == ["r"]


@pytest.mark.parametrize(("early", "messages"), [(False, 2), (True, 5)])
async def test_prompt_is_released_when_its_caller_has_all(early: bool, messages: int) -> None:
    """The caller ends the call then, perhaps before the prefill worker does. If a part
    is missing, the prompt stays for the next fetch."""
    request = pb.FetchKvRequest(request_id="r", slices=True, release=True, early=early)
    for read in range(1, messages + 1):
        engine = Holding()
        call = PrefillServicer(cast(Any, engine)).FetchKv(request, None)
        responses = cast(AsyncGenerator[pb.FetchKvResponse, None], call)
        for _ in range(read):
            await anext(responses)
        await responses.aclose()
        assert engine.released == (["r"] if read == messages else [])


@pytest.mark.parametrize("messages", [0, 1])
async def test_silent_prefill_worker_is_unavailable(messages: int) -> None:
    """So that the router prefills elsewhere."""
    with pytest.raises(Unavailable, match="sent nothing for 1 s"):
        await fetched_from(Prefill(hangs_after=messages))


async def test_damaged_hand_off_is_refused_and_counted() -> None:
    """Before anything of it is used; UNAVAILABLE, so that the router prefills again."""
    before = refused_as_damaged()
    with pytest.raises(RefusedHandOff, match="wrong checksum"):
        await fetched_from(Prefill(damages=True))
    assert refused_as_damaged() == before + 1


def refused_as_damaged() -> float:
    name = "forge_inference_hand_offs_refused_total"
    return REGISTRY.get_sample_value(name, {"reason": "damaged"}) or 0.0
