"""Follows the prefix cache of each worker that reports it.

One stream per worker, from its arrival in discovery to its departure. After a failure, or a gap in
the numbers of a stream, it is opened again and begins with the whole content.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc.aio

from forge.core.errors import DataLoss, ForgeError
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.concurrency.tasks import cancel_and_wait, raise_if_cancelled
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.status import from_rpc_error
from forge.runtime.telemetry import log
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from services.inference import kv_codec
from services.inference.engines.base import CacheChange
from services.inference.router.fleet.workers import Worker
from services.inference.router.metrics import CACHE_RESYNCS


class CacheWatch:
    """The streams of all workers of one router."""

    def __init__(self, channels: Channels, report: Callable[[Worker, CacheChange], None]) -> None:
        """`report`: takes each change, in order."""
        self._channels = channels
        self._report = report
        self._tasks: dict[Worker, asyncio.Task[None]] = {}

    def follow(self, workers: Iterable[Worker]) -> None:
        """Follow these workers, and no others."""
        wanted = {worker for worker in workers if worker.reports_cache}
        for worker in self._tasks.keys() - wanted:
            self._tasks.pop(worker).cancel()
        for worker in wanted - self._tasks.keys():
            self._tasks[worker] = asyncio.create_task(self._follow(worker))

    async def close(self) -> None:
        """End all streams."""
        await cancel_and_wait(*self._tasks.values())

    async def _follow(self, worker: Worker) -> None:
        backoff = Backoff(0.2, 5.0)
        while True:
            try:
                async with aclosing(_changes(self._channels, worker.address)) as changes:
                    async for change in changes:
                        backoff.reset()
                        self._report(worker, change)
            except ForgeError as error:
                raise_if_cancelled()
                CACHE_RESYNCS.inc()
                log.debug("cache_watch_failed", worker=worker.instance_id, error=str(error))
            await asyncio.sleep(backoff.next_s())


async def _changes(channels: Channels, address: str) -> Any:
    """Yield the changes of one stream. Raises ForgeError, DataLoss at a gap."""
    stub = channels.stub(rpc.CacheServiceStub, address)
    call: Any = stub.WatchCache(pb.WatchCacheRequest())
    expected = 0
    try:
        async for response in call:
            if response.sequence != expected:
                raise DataLoss(f"cache response {expected} expected, {response.sequence} received")
            expected += 1
            yield kv_codec.read_cache_change(response)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
