"""Many calls on one stream between router and worker: both real halves over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from forge.core.errors import ResourceExhausted
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.runtime.rpc.status import from_rpc_error
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SampledTokens
from services.inference.router import worker_streams as router_side
from services.inference.router.worker_streams import WorkerStreams
from services.inference.worker import worker_stream as worker_side
from services.inference.worker.worker_stream import WorkerServicer
from tests.support.inference.weight_sources import SECURITY
from tests.support.runtime.cut_connection import ADDRESS, CuttingProxy
from tests.support.runtime.waiting import settle, until

WAIT_S = 60.0
PIECE = 1000
"""Bytes of a piece."""


@dataclass(slots=True)
class Engine:
    """Both servicers behind the stream; does what the id of a request says."""

    step: asyncio.Event = field(default_factory=asyncio.Event)
    """Calls of the id "step" send a piece when it is set."""
    sent: dict[str, int] = field(default_factory=dict)
    """Pieces of each call."""
    running: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)

    async def Prefill(self, request: pb.PrefillRequest, context: None) -> pb.PrefillResponse:
        self.running.add(request.request_id)
        try:
            if request.request_id == "hangs":
                await asyncio.Event().wait()
        finally:
            self.running.discard(request.request_id)
        self.held.add(request.request_id)
        return pb.PrefillResponse(cached_tokens=7)

    def release(self, request_id: str) -> None:
        self.held.discard(request_id)

    async def answer(self, request: pb.DecodeRequest) -> AsyncIterator[pb.DecodeResponse]:
        name = request.request_id
        self.running.add(name)
        try:
            if name == "full":
                raise ResourceExhausted("no memory", retry_after_s=1.5)
            for number in range(request.sampling.max_tokens):
                if name.startswith("step"):
                    await self.step.wait()
                self.sent[name] = number + 1
                yield pb.DecodeResponse(tokens=SampledTokens(ids=bytes(PIECE)))
                await asyncio.sleep(0)
        finally:
            self.running.discard(name)


@dataclass(slots=True, kw_only=True)
class Pair:
    """A router's streams and one worker."""

    engine: Engine
    servicer: WorkerServicer
    streams: WorkerStreams
    worker: Any
    stop_server: Callable[[], Awaitable[None]]
    messages: list[pb.WorkerStreamResponse]
    """All that the worker has sent."""
    network: CuttingProxy

    def decode(self, name: str, *, pieces: int, timeout_s: float = WAIT_S) -> Any:
        request = pb.DecodeRequest(request_id=name)
        request.sampling.max_tokens = pieces
        return self.streams.decode(self.worker, request, timeout_s=timeout_s)

    def prefill(self, name: str, *, timeout_s: float = WAIT_S) -> Any:
        request = pb.PrefillRequest(request_id=name, hold_s=3600.0)
        return self.streams.prefill(self.worker, request, timeout_s=timeout_s)


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    engine: Any = Engine()
    servicer = WorkerServicer(prefill=engine, decode=engine)
    messages: list[pb.WorkerStreamResponse] = []

    class Observed(rpc.WorkerServiceServicer):
        async def WorkerStream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async for message in servicer.WorkerStream(requests, context):
                messages.append(message)
                yield message

    network = CuttingProxy()
    server = RpcServer(service="worker", host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(
        rpc.add_WorkerServiceServicer_to_server, Observed(), full_name="forge.v1.WorkerService"
    )
    address = await server.start()
    await network.start(to_port=int(address.rpartition(":")[2]))
    channels = Channels(SECURITY)
    streams = WorkerStreams(channels)
    worker = SimpleNamespace(
        address=f"{ADDRESS}:{network.port}", instance_id="w", serves_stream=True
    )
    try:
        async with asyncio.timeout(WAIT_S):
            yield Pair(
                engine=engine,
                servicer=servicer,
                streams=streams,
                worker=cast(Any, worker),
                stop_server=lambda: server.stop(grace_s=WAIT_S),
                messages=messages,
                network=network,
            )
    finally:
        await streams.close()
        await channels.close()
        await server.stop(grace_s=0)
        await network.close()


async def read(call: Any) -> int:
    """Pieces of a call."""
    return sum([1 async for _ in call])


async def test_unread_call_waits_and_the_others_go_on() -> None:
    """A router whose caller reads slowly: the worker stops this call alone, at its window, and goes
    on when it is read."""
    async with pair() as both:
        window = worker_side.CALL_WINDOW_BYTES // PIECE
        slow = both.decode("slow", pieces=4 * window)
        assert await read(both.decode("other", pieces=3 * window)) == 3 * window
        await until(lambda: both.engine.sent["slow"] >= window - 10)
        assert await read(both.decode("another", pieces=3 * window)) == 3 * window
        assert both.engine.sent["slow"] <= window + 1
        assert await read(slow) == 4 * window


async def test_pieces_of_one_step_are_one_message() -> None:
    """Whatever call they belong to."""
    async with pair() as both:
        calls = [both.decode(f"step {number}", pieces=1) for number in range(50)]
        await until(lambda: len(both.engine.running) == 50)
        before = len(both.messages)
        both.engine.step.set()
        assert await asyncio.gather(*map(read, calls)) == [1] * 50
        of_step = both.messages[before:]
        assert len(of_step) <= 2, [len(one.events) for one in of_step]


async def test_cancelled_call_leaves_the_worker() -> None:
    """Its reader gets CancelledError, as of gRPC; the other calls of the stream go on."""
    async with pair() as both:
        left, kept = (both.decode(name, pieces=9) for name in ("step left", "step kept"))
        await until(lambda: len(both.engine.running) == 2)
        assert left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await anext(left)
        await until(lambda: both.engine.running == {"step kept"})
        both.engine.step.set()
        assert await read(kept) == 9
        assert not kept.cancel()


async def test_refusal_has_the_status_of_the_workers_error() -> None:
    """With its class and retry hint, so that the router knows that the worker is alive."""
    async with pair() as both:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await read(both.decode("full", pieces=1))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_rpc_error(refused.value)
        assert type(error) is ResourceExhausted and error.retry_after_s == 1.5


async def test_call_that_hangs_ends_with_its_deadline() -> None:
    """At the router and at the worker."""
    async with pair() as both:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await both.prefill("hangs", timeout_s=0.2)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not both.engine.running)


async def test_cut_stream_ends_its_calls_and_the_next_call_opens_another() -> None:
    """Pieces that arrived before the cut are read first; then each call is UNAVAILABLE without the
    mark of an answer: the worker counts as lost."""
    async with pair() as both:
        calls = [both.decode(f"long {number}", pieces=10_000) for number in range(3)]
        assert [await anext(call) for call in calls]
        both.network.cut_all()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await read(call)
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            assert not lost.value.trailing_metadata()
        await until(lambda: not both.engine.running)
        assert await read(both.decode("again", pieces=2)) == 2


async def test_prompts_of_a_lost_router_are_released() -> None:
    """Nobody else would fetch them: a worker does not hold them until hold_s, or for its drain."""
    async with pair() as both:
        assert (await both.prefill("a")).cached_tokens == 7
        await both.prefill("b")
        assert both.engine.held == {"a", "b"}
        both.streams.release(both.worker, "a", session_id="")
        await until(lambda: both.engine.held == {"b"})
        both.network.cut_all()
        await until(lambda: not both.engine.held)


async def test_draining_worker_finishes_its_calls_and_ends_the_stream() -> None:
    """New calls are refused, the running one is served to its end, and the server stops."""
    async with pair() as both:
        running = both.decode("step", pieces=2)
        await until(lambda: both.engine.running == {"step"})
        both.servicer.drain()
        with pytest.raises(grpc.aio.AioRpcError, match="this worker is draining") as refused:
            await read(both.decode("late", pieces=1))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        stopped = asyncio.ensure_future(both.stop_server())
        await settle()
        assert not stopped.done()
        both.engine.step.set()
        assert await read(running) == 2
        await stopped


async def test_worker_that_is_not_there_is_unavailable() -> None:
    """Each call, also the second one; without the mark of an answer."""
    async with pair() as both:
        await both.stop_server()
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await read(both.decode("step", pieces=1))
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
            assert not lost.value.trailing_metadata()


async def test_half_window_is_within_the_workers() -> None:
    """Else a call would wait for a read that the router does not send."""
    assert router_side.READ_BYTES * 2 <= worker_side.CALL_WINDOW_BYTES
