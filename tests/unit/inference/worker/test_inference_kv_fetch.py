"""Keys and values that a decode worker pulls from a prefill instance over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import Unavailable
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SampledTokens, SamplingParams
from services.inference import codec
from services.inference.engines.base import FetchKv, KvSpan, ModelLimits, Piece, RefusedHandOff
from services.inference.engines.capabilities import Capabilities
from services.inference.worker.service import DecodeServicer
from tests.support.inference.weight_sources import SECURITY

DATA = bytes(range(256)) * 8192
SPAN = KvSpan(
    from_token=0, tokens=1, version=3, dtype="uint8", shape=(1, 2, 1, 1, 1 << 20), data=DATA
)


class Prefill(rpc.PrefillServiceServicer):
    """Sends the span, or so many messages of it and then nothing, or damages its last byte."""

    def __init__(
        self, *, slices: bool = True, hangs_after: int | None = None, damages: bool = False
    ) -> None:
        self._slices = slices
        self._hangs_after = hangs_after
        self._damages = damages

    async def FetchKv(
        self, request: pb.FetchKvRequest, context: Any
    ) -> AsyncIterator[pb.FetchKvResponse]:
        for sent, response in enumerate(codec.write_span(SPAN, slices=self._slices)):
            if sent == self._hangs_after:
                await asyncio.Event().wait()
            if self._damages and sent == 1:
                response.slice.data = response.slice.data[:-1] + b"?"
            yield response


class Engine:
    """Fetches what the prompt's keys and values are, and samples nothing."""

    limits = ModelLimits(context_tokens=8, vocabulary=10)
    capabilities = Capabilities(
        engine="none", roles=frozenset({"decode"}), update="in_flight", draws="positional"
    )
    fetched: KvSpan | None = None

    async def decode(
        self, prompt: Any, first: Any, fetch: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        self.fetched = await fetch(0)
        return
        yield


async def fetched_from(prefill: Prefill) -> KvSpan | None:
    """What a decode worker gets of that prefill instance."""
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(
        rpc.add_PrefillServiceServicer_to_server, prefill, full_name="forge.v1.PrefillService"
    )
    channels, engine = Channels(SECURITY), Engine()
    token = (1).to_bytes(4, "little")
    request = pb.DecodeRequest(
        request_id="r",
        prompt_ids=token,
        sampling=SamplingParams(max_tokens=1),
        prefill_address=await server.start(),
        first=SampledTokens(ids=token, logprobs=bytes(4), weight_versions=token),
    )
    try:
        decode = DecodeServicer(cast(Any, engine), channels, silence_s=1.0)
        async for _ in decode.Decode(request, None):
            pass
        return engine.fetched
    finally:
        await channels.close()
        await server.stop(grace_s=0)


@pytest.mark.parametrize("slices", [True, False])
async def test_kv_hand_off_arrives_whole(slices: bool) -> None:
    """In slices, and from an instance of an earlier release in chunks."""
    assert await fetched_from(Prefill(slices=slices)) == SPAN


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
