"""Workers that fetch the changes of a version alone, and whole tensors where these do not fit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from forge.runtime.rpc.server import RpcServer
from forge.runtime.weights import FULL_NAME, HeldWeights, WeightServicer
from forge.runtime.weights.delta import DeltaEncoder
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from tests.support.inference.weight_sources import (
    SECURITY,
    Weights,
    Worker,
    manifest_of,
    tensors_of,
)

SIZE = 2 << 20
BASE = {"a": bytes(SIZE), "b": bytes(range(256)) * 16, "c": b"c" * 100}
NEXT = {"a": b"\1" + bytes(SIZE - 2) + b"\2", "b": bytes(range(255, -1, -1)) * 16, "c": b"c" * 100}
THIRD = {**NEXT, "a": b"\1" + bytes(SIZE - 1)}


class Trainer(WeightServicer):
    """A publisher's servicer; counts the data it sends."""

    def __init__(self) -> None:
        self.versions: dict[int, HeldWeights] = {}
        super().__init__(lambda: self.versions, deltas=DeltaEncoder())
        self.requests: list[pb.FetchWeightsRequest] = []
        self.sent_bytes = 0
        self.damages = False
        """Change a byte of each delta."""

    def hold(self, version: int, weights: Weights) -> None:
        self.versions[version] = HeldWeights(
            tensors=tensors_of(weights), manifest=manifest_of(version, weights)
        )

    async def FetchWeights(
        self, request: pb.FetchWeightsRequest, context: Any
    ) -> AsyncIterator[pb.FetchWeightsResponse]:
        self.requests.append(request)
        async for response in super().FetchWeights(request, context):
            for piece in response.slices:
                if self.damages and piece.base_version:
                    piece.data = piece.data[:-1] + bytes([piece.data[-1] ^ 1])
                self.sent_bytes += len(piece.data)
            yield response


@asynccontextmanager
async def trainer(**versions: Weights) -> AsyncIterator[tuple[Trainer, str]]:
    source = Trainer()
    for version, weights in enumerate(versions.values(), 1):
        source.hold(version, weights)
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(rpc.add_WeightServiceServicer_to_server, source, full_name=FULL_NAME)
    yield source, await server.start()
    await server.stop(grace_s=0)


def counted(name: str) -> float:
    found = REGISTRY.get_sample_value(f"forge_inference_weight_{name}_total")
    return found or 0.0


async def test_worker_fetches_changes_against_its_version() -> None:
    """The first version whole, the next one by its changes; a tensor that changed everywhere
    travels whole."""
    async with trainer(first=BASE, second=NEXT) as (source, address):
        worker = Worker(silence_s=60.0)
        worker.publish(1, BASE, source=address)
        assert await worker.until_serving(1) == BASE
        first_bytes, source.sent_bytes = source.sent_bytes, 0
        before_bytes = counted("wire_bytes")
        worker.publish(2, NEXT, source=address)
        assert await worker.until_serving(2) == NEXT
        await worker.stop()
    assert first_bytes == sum(map(len, BASE.values()))
    assert len(NEXT["b"]) < source.sent_bytes < len(NEXT["b"]) + 20_000
    assert counted("wire_bytes") == before_bytes + source.sent_bytes


async def test_changes_are_relayed_and_late_workers_get_whole_tensors() -> None:
    """A worker with the base takes the changes from another worker; one without gets everything,
    from it, too."""
    async with trainer(first=BASE, second=NEXT) as (source, address):
        workers = [Worker(name=name, silence_s=60.0) for name in ("first", "second", "late")]
        first, second, late = workers
        for worker in (first, second):
            worker.publish(1, BASE, source=address)
            assert await worker.until_serving(1) == BASE
        first_address = await first.serve()
        first.publish(2, NEXT, source=address)
        assert await first.until_serving(2) == NEXT
        source.requests.clear()
        before_bytes = counted("wire_bytes")
        second.show([first_address], version=2)
        second.publish(2, NEXT, source=address)
        assert await second.until_serving(2) == NEXT
        relayed_bytes = counted("wire_bytes") - before_bytes
        late.show([first_address], version=2)
        late.publish(2, NEXT, source=address)
        assert await late.until_serving(2) == NEXT
        late_bytes = counted("wire_bytes") - before_bytes - relayed_bytes
        for worker in workers:
            await worker.stop()
    assert not source.requests
    assert relayed_bytes < len(NEXT["b"]) + 20_000
    assert late_bytes == sum(map(len, NEXT.values()))


async def test_damaged_delta_falls_back_to_whole_tensors() -> None:
    """Its result has another digest than the manifest: the rest of the version travels whole, and a
    later version by its changes again."""
    async with trainer(first=BASE, second=NEXT, third=THIRD) as (source, address):
        worker = Worker(silence_s=60.0)
        worker.publish(1, BASE, source=address)
        await worker.until_serving(1)
        before = counted("deltas_refused")
        source.damages = True
        worker.publish(2, NEXT, source=address)
        assert await worker.until_serving(2) == NEXT
        assert counted("deltas_refused") == before + 1
        source.damages, source.sent_bytes = False, 0
        worker.publish(3, THIRD, source=address)
        assert await worker.until_serving(3) == THIRD
        await worker.stop()
    assert [request.base_version for request in source.requests] == [0, 1, 0, 2]
    assert source.sent_bytes < 20_000


@pytest.mark.parametrize("held", ["unknown", "other"])
async def test_version_that_the_trainer_does_not_hold_is_no_base(held: str) -> None:
    """After two publications, or a restart of the trainer, tensors travel whole; so they do against
    a base with other shapes."""
    async with trainer(first=BASE, second=BASE, third=NEXT) as (source, address):
        worker = Worker(silence_s=60.0)
        worker.publish(1, BASE, source=address)
        await worker.until_serving(1)
        if held == "unknown":
            del source.versions[1]
        else:
            source.hold(1, {"a": b"", "b": b"other", "c": b""})
        source.sent_bytes = 0
        worker.publish(3, NEXT, source=address)
        assert await worker.until_serving(3) == NEXT
        await worker.stop()
    assert source.sent_bytes == sum(map(len, NEXT.values()))
