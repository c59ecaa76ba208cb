"""The router's streams of caches: real gRPC, gaps and losses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forge.core.errors import Unavailable
from forge.core.placement.cache_view import CacheView
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.engines.base import CacheChange
from services.inference.router import cache_watch
from services.inference.router.cache_watch import CacheWatch
from services.inference.router.fleet.workers import Engine, Worker
from tests.support.inference.weight_sources import SECURITY

CHAIN = bytes(8)


class Scripted(rpc.CacheServiceServicer):
    """Sends responses with these sequence numbers, then waits; the next call the next ones."""

    def __init__(self, *calls: list[int]) -> None:
        self.calls = list(calls)
        self.opened = 0

    async def WatchCache(
        self, request: pb.WatchCacheRequest, context: Any
    ) -> AsyncIterator[pb.WatchCacheResponse]:
        numbers = self.calls[min(self.opened, len(self.calls) - 1)]
        self.opened += 1
        for number in numbers:
            yield pb.WatchCacheResponse(sequence=number, anew=number == 0, stored=CHAIN)
        await asyncio.Event().wait()


def worker_at(address: str) -> Worker:
    return Worker(
        instance_id="w", engine=Engine(role="both"), address=address, capacity=1, version=1,
        cached=CacheView(block_tokens=8, capacity_tokens=80), reports_cache=True,
    )  # fmt: skip


@asynccontextmanager
async def watching(source: Scripted) -> AsyncIterator[asyncio.Queue[CacheChange]]:
    """The changes that a watch of one worker reports."""
    server = RpcServer(service="decode", host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(
        rpc.add_CacheServiceServicer_to_server, source, full_name="forge.v1.CacheService"
    )
    address = await server.start()
    channels = Channels(SECURITY)
    seen: asyncio.Queue[CacheChange] = asyncio.Queue()
    watch = CacheWatch(channels, lambda worker, change: seen.put_nowait(change))
    worker = worker_at(address)
    try:
        watch.follow([worker])
        # Again: an unchanged worker keeps its stream.
        watch.follow([worker])
        yield seen
    finally:
        watch.follow([])
        await watch.close()
        await channels.close()
        await server.stop(grace_s=0)


async def test_stream_with_a_gap_is_opened_again() -> None:
    """It begins with the whole content; nothing after the gap is used."""
    source = Scripted([0, 1, 3], [0])
    async with watching(source) as seen, asyncio.timeout(60):
        changes = [await seen.get() for _ in range(3)]
    assert [change.anew for change in changes] == [True, False, True]
    assert source.opened == 2


async def test_worker_is_followed_once() -> None:
    """However often discovery changes."""
    source = Scripted([0, 1])
    async with watching(source) as seen, asyncio.timeout(60):
        assert [(await seen.get()).anew for _ in range(2)] == [True, False]
    assert source.opened == 1


async def test_cancellation_that_a_stream_loses_ends_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gRPC stream that fails while it is cancelled raises its own error: the stream of a worker
    that has left is not opened again."""
    opened = asyncio.Event()

    async def losing(*_: Any) -> AsyncIterator[CacheChange]:
        opened.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Unavailable("the connection ended") from None
        yield CacheChange()

    monkeypatch.setattr(cache_watch, "_changes", losing)
    watch = CacheWatch(Channels(SECURITY), lambda worker, change: None)
    watch.follow([worker_at("127.0.0.1:1")])
    await opened.wait()
    (following,) = watch._tasks.values()
    watch.follow([])
    await asyncio.wait({following}, timeout=30)
    assert following.cancelled()
