"""A router that streams scripted answers, and the gateway's side of the stream to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio

from forge.core.errors import ResourceExhausted
from forge.core.token_columns import float32_bytes, int32_array, int32_bytes
from forge.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from services.gateway.router.router_stream import RouterStreams
from services.gateway.router.sample_call import SampleCall
from services.inference.router import sample_stream as router_side
from tests.support.runtime.waiting import until

WAIT_S = 30.0


def request(*ids: int, name: str = "") -> inference_pb2.SampleRequest:
    return inference_pb2.SampleRequest(request_id=name, prompt_ids=int32_bytes(ids))


def response(*ids: int, last: bool = False) -> inference_pb2.SampleResponse:
    return inference_pb2.SampleResponse(
        tokens=common_pb2.SampledTokens(
            ids=int32_bytes(ids),
            logprobs=float32_bytes([-0.5] * len(ids)),
            weight_versions=int32_bytes([1] * len(ids)),
        ),
        finish_reason=(
            common_pb2.FINISH_REASON_STOP if last else common_pb2.FINISH_REASON_UNSPECIFIED
        ),
    )


class Router(inference_pb2_grpc.InferenceServiceServicer):
    """Answers a prompt with its own ids, one by one, and does what a request's name says."""

    def __init__(self) -> None:
        self.kept = router_side.SampleStreams(self.sample, interval_s=0)
        self.streams = 0
        self.go_on = asyncio.Event()
        """Those that hold wait for it, in the middle of their answer."""
        self.left: list[str] = []
        """Names of the answers that were not wanted to their end."""
        self.at_work: set[str] = set()
        """Names of the answers that are under way."""
        self.server = grpc.aio.server()
        self.address = ""

    async def SampleStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        self.streams += 1
        async for answer in self.kept.serve(requests):
            yield answer

    async def sample(
        self, asked: inference_pb2.SampleRequest
    ) -> AsyncGenerator[inference_pb2.SampleResponse, None]:
        if asked.request_id == "busy":
            raise ResourceExhausted("7 requests are waiting", retry_after_s=1.5)
        if asked.request_id == "bug":
            raise ZeroDivisionError("of the router")
        if asked.request_id == "cancelled":
            raise asyncio.CancelledError
        ids = int32_array(asked.prompt_ids)
        whole = False
        self.at_work.add(asked.request_id)
        try:
            for at, token_id in enumerate(ids):
                await asyncio.sleep(0)
                yield response(token_id, last=at == len(ids) - 1)
                if asked.request_id.startswith("hold") and not at:
                    await self.go_on.wait()
            whole = True
        finally:
            self.at_work.discard(asked.request_id)
            if not whole:
                self.left.append(asked.request_id)

    async def until_left(self, *names: str) -> None:
        await until(lambda: sorted(self.left) == sorted(names))


class Remote:
    """Discovery that shows the routers it is given; the last one is picked."""

    def __init__(self, *routers: Router) -> None:
        self.routers = list(routers)
        self.channels: list[grpc.aio.Channel] = []

    def instances(self) -> list[Any]:
        return [SimpleNamespace(address=router.address) for router in self.routers]

    async def pick(self, *, where: Any, timeout_s: float) -> tuple[Any, Any]:
        router = self.routers[-1]
        self.channels.append(grpc.aio.insecure_channel(router.address))
        stub = inference_pb2_grpc.InferenceServiceStub(self.channels[-1])
        return SimpleNamespace(address=router.address, instance_id="router-0"), stub


@asynccontextmanager
async def listening() -> AsyncIterator[Router]:
    router = Router()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, router.server)
    router.address = f"127.0.0.1:{router.server.add_insecure_port('127.0.0.1:0')}"
    await router.server.start()
    yield router
    await router.server.stop(None)


@asynccontextmanager
async def connected(*routers: Router) -> AsyncIterator[RouterStreams]:
    remote = Remote(*routers)
    streams = RouterStreams(cast(Any, remote))
    yield streams
    await streams.close_streams()
    for channel in remote.channels:
        await channel.close()


def call_of(streams: RouterStreams, *, timeout_s: float = WAIT_S) -> SampleCall:
    """A call that is never sampled again."""
    return SampleCall(streams, timeout_s=timeout_s, retry_for_s=0.0)


async def begin(
    streams: RouterStreams, asked: inference_pb2.SampleRequest, *, timeout_s: float = WAIT_S
) -> SampleCall:
    call = call_of(streams, timeout_s=timeout_s)
    call.set_request(asked)
    await call.send_request()
    return call


async def rest(call: SampleCall) -> list[int]:
    ids: list[int] = []
    while (said := await call.read_response()) is not None:
        ids += int32_array(said.tokens.ids)
    return ids
