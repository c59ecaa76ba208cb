"""A real server of weights with a bulk port, whose sends a test may change, here or in a process.

`python -m tests.support.inference.bulk_sources VERSION FILL MIB SLICES` serves one tensor `w` of
MIB MiB with bytes FILL, sends SLICES slices of it and half of the next one, then nothing, and
prints its address.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.weights import FULL_NAME, HeldWeights, WeightServicer
from forge.runtime.weights.bulk import BulkServer, BulkStream
from forge.runtime.weights.delta import DeltaEncoder
from forge.runtime.weights.manifest import slices_of
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from tests.support.inference.weight_sources import (
    SECURITY,
    Weights,
    Worker,
    manifest_of,
    tensors_of,
)

Send = Callable[[Sequence[memoryview]], Coroutine[Any, Any, None]]
Hook = Callable[[Send, Sequence[memoryview]], Coroutine[Any, Any, None]]
"""Sends slices in place of a stream."""


def _hooked(make: Callable[[], BulkStream | None], hook: Hook) -> BulkStream | None:
    stream = make()
    if stream is not None:
        stream.send = partial(hook, stream.send)  # type: ignore[method-assign]
    return stream


class BulkSource:
    """A server that holds versions."""

    def __init__(
        self,
        *,
        hook: Hook | None = None,
        server: type[BulkServer] = BulkServer,
        security: Security = SECURITY,
        settings: BulkSettings | None = None,
        wait_s: float = 60.0,
    ) -> None:
        self.held: dict[int, HeldWeights] = {}
        self.requests: list[pb.FetchWeightsRequest] = []
        self.bulk = server(security, settings or BulkSettings(), host="127.0.0.1", wait_s=wait_s)
        if hook is not None:
            self.bulk.stream = partial(_hooked, self.bulk.stream, hook)  # type: ignore[method-assign]
        self._servicer = WeightServicer(lambda: self.held, deltas=DeltaEncoder(), bulk=self.bulk)
        self._server = RpcServer(service="test", host="127.0.0.1", port=0, security=security)

    def hold(self, version: int, weights: Weights, *, segment: range | None = None) -> None:
        """Hold a version, or the tensors of a segment of it."""
        tensors = tensors_of(weights)
        self.held[version] = HeldWeights(
            tensors=tensors[segment.start : segment.stop] if segment else tensors,
            manifest=manifest_of(version, weights),
            segment=segment,
        )

    async def start(self) -> str:
        """Serve; returns the address."""
        source = self

        class Noted(rpc.WeightServiceServicer):
            async def FetchManifest(self, request: Any, context: Any) -> AsyncIterator[Any]:
                async for response in source._servicer.FetchManifest(request, context):
                    yield response

            async def FetchWeights(self, request: Any, context: Any) -> AsyncIterator[Any]:
                noted = pb.FetchWeightsRequest()
                noted.CopyFrom(request)
                source.requests.append(noted)
                async for response in source._servicer.FetchWeights(request, context):
                    yield response

        self._server.add_service(
            rpc.add_WeightServiceServicer_to_server, Noted(), full_name=FULL_NAME
        )
        return await self._server.start()

    async def stop(self) -> None:
        """Stop serving."""
        await self._server.stop(grace_s=0)
        self.bulk.close()


@asynccontextmanager
async def bulk_source(weights: Weights, **options: Any) -> AsyncIterator[tuple[BulkSource, str]]:
    """A source with version 1, and its address."""
    source = BulkSource(**options)
    source.hold(1, weights)
    try:
        yield source, await source.start()
    finally:
        await source.stop()


def fetched_bytes(worker: Worker) -> int:
    """Bytes of the fetch that runs."""
    fetch = worker.follower._fetch
    return fetch.received_bytes if fetch is not None else 0


def sliced(data: Sequence[memoryview]) -> list[memoryview]:
    """Slices with a digest each."""
    return [piece for one in data for piece in slices_of(one)]


def halting(slices: int, stopped: asyncio.Event | None = None) -> Hook:
    """Send so many slices and half of the next one, then nothing."""
    left = slices

    async def hook(send: Send, data: Sequence[memoryview]) -> None:
        nonlocal left
        for one in sliced(data):
            if not left:
                await send([one[: len(one) // 2]])
                if stopped is not None:
                    stopped.set()
                await asyncio.Event().wait()
            await send([one])
            left -= 1

    return hook


async def _serve(version: int, fill: int, mib: int, slices: int) -> None:
    source = BulkSource(hook=halting(slices))
    source.hold(version, {"w": bytes([fill]) * (mib << 20)})
    print(await source.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(*map(int, sys.argv[1:])))
