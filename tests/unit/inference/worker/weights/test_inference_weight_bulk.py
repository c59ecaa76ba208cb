"""Weights whose bytes arrive over a bulk connection."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import structlog

from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.weights import Segment
from services.inference.worker.metrics import VERSIONS
from tests.support.inference.bulk_sources import BulkSource, bulk_source, fetched_bytes, halting
from tests.support.inference.weight_sources import Worker, announcement_of
from tests.support.runtime.waiting import until

MIB = 1 << 20
RANDOM = Random(0)
WEIGHTS = {
    "large": RANDOM.randbytes(3 * MIB + 5),
    "small": b"norm",
    "empty": b"",
    "middle": RANDOM.randbytes(MIB // 2),
    "whole": RANDOM.randbytes(2 * MIB),
}


def versions(way: str) -> float:
    """Complete versions by this way so far."""
    return float(VERSIONS.labels(way)._value.get())


async def fetch_from(worker: Worker, address: str) -> list[dict[str, object]]:
    """Fetch version 1; returns the log."""
    with structlog.testing.capture_logs() as logs:
        worker.publish(1, WEIGHTS, source=address)
        assert await worker.until_serving(1) == WEIGHTS
    return [dict(line) for line in logs]


async def test_bytes_arrive_over_a_bulk_connection() -> None:
    """Large and small tensors, each equal to the published one; the metric names the way."""
    before = versions("bulk")
    async with bulk_source(WEIGHTS) as (_, address):
        worker = Worker(silence_s=60.0)
        logs = await fetch_from(worker, address)
        await worker.stop()
    (swapped,) = [line for line in logs if line["event"] == "weights_swapped"]
    assert swapped["way"] == "bulk" and swapped["wire_bytes"] == sum(map(len, WEIGHTS.values()))
    assert versions("bulk") == before + 1


async def test_next_version_arrives_as_deltas_and_whole_tensors() -> None:
    """Deltas travel in the call, tensors without one on the connection."""
    changed = bytearray(WEIGHTS["large"])
    changed[7] ^= 1
    following = {**WEIGHTS, "large": bytes(changed), "whole": RANDOM.randbytes(2 * MIB)}
    async with bulk_source(WEIGHTS) as (source, address):
        source.hold(2, following)
        worker = Worker(silence_s=60.0)
        await fetch_from(worker, address)
        worker.publish(2, following, source=address)
        assert await worker.until_serving(2) == following
        deltas = worker.follower.weights[2].deltas
        await worker.stop()
    assert deltas.base_version == 1 and "large" in deltas.by_name and "whole" not in deltas.by_name


async def test_segments_of_two_ranks_arrive_over_two_connections() -> None:
    """Each rank has a port of its own."""
    first, second = BulkSource(), BulkSource()
    first.hold(1, WEIGHTS, segment=range(2))
    second.hold(1, WEIGHTS, segment=range(2, 5))
    addresses = await first.start(), await second.start()
    announced = msgspec.structs.replace(
        announcement_of(1, WEIGHTS, source=addresses[0]),
        segments=(Segment(0, addresses[0]), Segment(2, addresses[1])),
    )
    before, worker = versions("bulk"), Worker(silence_s=60.0)
    worker._announcements.put_nowait(announced.encode())
    assert await worker.until_serving(1) == WEIGHTS
    await worker.stop()
    await first.stop()
    await second.stop()
    assert versions("bulk") == before + 1
    assert [request.from_tensor for request in second.requests] == [2]


async def test_workers_relay_over_bulk_connections_what_arrives_over_one() -> None:
    """The second worker has the slices of the first before the fetch of that one ends."""
    stopped = asyncio.Event()
    weights = {"a": RANDOM.randbytes(36 * MIB)}
    async with bulk_source(weights, hook=halting(33, stopped)) as (_, address):
        first, second = Worker(silence_s=60.0, name="w0"), Worker(silence_s=60.0, name="w1")
        relay = await first.serve()
        second.show([relay], version=1)
        for worker in (first, second):
            worker.publish(1, weights, source=address)
        await stopped.wait()
        # Messages have up to 16 MiB.
        await until(lambda: fetched_bytes(second) == 32 * MIB)
        assert not first.follower.weights
        assert second.follower._fetch._assembly.bulk_bytes == 32 * MIB  # type: ignore[union-attr]
        await second.stop()
        await first.stop()


async def test_newer_version_interrupts_a_bulk_connection() -> None:
    """A fetch that waits within a slice ends at once, and its stream at the source."""
    stopped = asyncio.Event()
    async with (
        bulk_source(WEIGHTS, hook=halting(1, stopped)) as (left, hung),
        bulk_source(WEIGHTS) as (trainer, address),
    ):
        trainer.hold(2, WEIGHTS)
        worker = Worker(silence_s=600.0)
        worker.publish(1, WEIGHTS, source=hung)
        await stopped.wait()
        worker.publish(2, WEIGHTS, source=address)
        assert await worker.until_serving(2) == WEIGHTS
        assert 1 not in worker.engine.loaded
        await until(lambda: not left.bulk._streams)
        await worker.stop()


async def test_setting_leaves_all_bytes_to_grpc() -> None:
    """At a worker, which requests no connection, and at a source, which offers none."""
    off = BulkSettings(enabled=False)
    before = versions("grpc")
    async with bulk_source(WEIGHTS) as (source, address):
        worker = Worker(silence_s=60.0, bulk=off)
        await fetch_from(worker, address)
        await worker.stop()
    assert [request.bulk for request in source.requests] == [False]
    async with bulk_source(WEIGHTS, settings=off) as (source, address):
        worker = Worker(silence_s=60.0)
        await fetch_from(worker, address)
        await worker.stop()
    assert [request.bulk for request in source.requests] == [True]
    assert versions("grpc") == before + 2
