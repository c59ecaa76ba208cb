"""The announcement of a shard that refuses turns for lack of room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from forge.client.stored.pool import NO_ROOM_KEY, refusals
from services.pool import room_watch
from services.pool.readers import ReaderThreads
from services.pool.room_watch import watch_room
from services.pool.store import PoolStore


async def test_shard_below_its_reserve_announces_it_until_there_is_room(
    open_store: Callable[..., PoolStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One announcement for each change, although the free bytes differ at each look."""
    monkeypatch.setattr(room_watch, "PERIOD_S", 0.0)
    store = open_store(shard="s0", disk_reserve_bytes=1 << 62)
    metadata = {"shard": "s0"}
    announced: list[str] = []
    free_bytes = iter(range(1 << 20, 1 << 21))
    monkeypatch.setattr(
        type(store.environment), "disk_free_bytes", property(lambda _: next(free_bytes))
    )

    async def announce() -> None:
        announced.append(metadata[NO_ROOM_KEY])

    readers = ReaderThreads(1)
    watching = asyncio.create_task(watch_room(store, readers, metadata, announce))
    async with asyncio.timeout(60.0):
        while next(free_bytes) < (1 << 20) + 20:
            await asyncio.sleep(0.001)
        reason = f"its disk and map have room for less than store.disk_reserve_bytes = {1 << 62}"
        assert announced == [reason]
        ((text, remedy),) = refusals(metadata)
        assert text == f"pool shard s0 refuses turns, so its rollouts wait: {reason}"
        assert "docs/pool_retention.md" in remedy
        store.disk_reserve_bytes = 0
        while len(announced) == 1:
            await asyncio.sleep(0.001)
    assert announced == [reason, ""] and not [*refusals(metadata)]
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    await readers.close()
