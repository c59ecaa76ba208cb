"""Workers during a hold: they serve what it names, older or newer, and return to the newest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forge.runtime.weights import NO_HOLD, WeightHold
from tests.support.inference.weight_sources import Source, Weights, Worker, announcement_of
from tests.support.runtime.waiting import until

MIB = 1 << 20
OLD: Weights = {"a": b"old"}
NEW: Weights = {"a": b"new"}


@asynccontextmanager
async def published(*, pause_s: float = 0.0) -> AsyncIterator[tuple[Source, str]]:
    """A trainer with versions 1 to 3."""
    source = Source(pause_s=pause_s)
    source.held |= {1: OLD, 2: NEW, 3: {"a": b"newest"}}
    address = await source.start()
    try:
        yield source, address
    finally:
        await source.stop()


def hold_of(source: Source, address: str, base: int, canary: int = 0, *names: str) -> WeightHold:
    versions = {
        one: announcement_of(one, source.held[one], source=address) for one in (base, canary) if one
    }
    return WeightHold(base=versions[base], canary=versions.get(canary), canary_workers=names)


async def test_held_version_returns_and_stays() -> None:
    """Newer publications wait, also when a restarted trainer writes the hold again; its end brings
    the newest one."""
    async with published() as (source, address):
        worker = Worker()
        worker.publish(2, NEW, source=address)
        await worker.until_serving(2)
        worker.hold(hold_of(source, address, 1))
        assert await worker.until_serving(1) == OLD
        worker.publish(3, source.held[3], source=address)
        follower = worker.follower
        await until(lambda: follower._newest is not None and follower._newest.weight_version == 3)
        worker.hold(hold_of(source, "restarted:1", 1))
        await until(lambda: follower._wanted is not None and follower._wanted.source != address)
        assert list(worker.engine.loaded) == [2, 1]
        worker.hold(NO_HOLD)
        await worker.until_serving(3)
        assert list(worker.engine.loaded) == [2, 1, 3]
        await worker.stop()


async def test_worker_that_starts_during_a_hold_fetches_the_held_version() -> None:
    """It knows the hold before it fetches anything."""
    async with published() as (source, address):
        worker = Worker(known_hold=False)
        worker.publish(3, source.held[3], source=address)
        for _ in range(20):
            await asyncio.sleep(0)
        worker.hold(hold_of(source, address, 2))
        assert await worker.until_serving(2) == NEW
        assert list(worker.engine.loaded) == [2]
        await worker.stop()


async def test_canary_is_served_by_its_workers_alone() -> None:
    """The others serve the base; a rollback of the canary returns to it."""
    async with published() as (source, address):
        canary, other = Worker(name="w1"), Worker(name="w2")
        for worker in (canary, other):
            worker.publish(3, source.held[3], source=address)
            worker.hold(hold_of(source, address, 1, 2, "w1"))
        assert (await canary.until_serving(2), await other.until_serving(1)) == (NEW, OLD)
        canary.hold(hold_of(source, address, 1))
        await canary.until_serving(1)
        for worker in (canary, other):
            await worker.stop()


async def test_hold_interrupts_the_fetch_of_a_newer_version() -> None:
    """Although most of it has arrived: it would overtake the hold."""
    async with published(pause_s=0.02) as (source, address):
        source.held[3] = {"a": bytes(40 * MIB)}
        worker = Worker(silence_s=60.0)
        worker.publish(1, OLD, source=address)
        await worker.until_serving(1)
        worker.publish(3, source.held[3], source=address)

        def most_arrived() -> bool:
            fetch = worker.follower._fetch
            return fetch is not None and fetch.received_bytes > 21 * MIB

        await until(most_arrived)
        worker.hold(hold_of(source, address, 2))
        await worker.until_serving(2)
        assert list(worker.engine.loaded) == [1, 2]
        await worker.stop()


async def test_refused_held_version_leaves_the_present_one_in_service() -> None:
    """The worker says so, and does not fetch it again."""
    async with published() as (source, address):
        worker = Worker()
        worker.engine.refuses.add(1)
        worker.publish(2, NEW, source=address)
        await worker.until_serving(2)
        worker.hold(hold_of(source, address, 1))
        await worker.until_announced(
            lambda metadata: (
                "version 1 is refused, version 2 stays" in metadata["weights_error"]
                if "weights_error" in metadata
                else False
            )
        )
        worker.hold(NO_HOLD)
        worker.publish(3, source.held[3], source=address)
        await worker.until_serving(3)
        assert sum(one.weight_version == 1 for one in source.requests) == 1
        await worker.stop()


async def test_worker_relays_an_older_version_while_it_fetches_it() -> None:
    """After a rollback no worker has the version, and the trainer sends it once."""
    async with published(pause_s=0.02) as (source, address):
        source.held[1] = {"a": bytes(8 * MIB)}
        first, second = Worker(name="w1", silence_s=60.0), Worker(name="w2", silence_s=60.0)
        for worker in (first, second):
            worker.publish(2, NEW, source=address)
            await worker.until_serving(2)
        first.hold(hold_of(source, address, 1))
        relay = await first.serve()
        await until(lambda: first.follower.relay.fetches(1))
        second.show([relay], version=1)
        second.hold(hold_of(source, address, 1))
        assert await second.until_serving(1) == source.held[1]
        assert sum(one.weight_version == 1 for one in source.requests) == 1
        for worker in (first, second):
            await worker.stop()
