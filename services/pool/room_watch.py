"""Announces in discovery why a shard refuses turns while its disk or map has too little room."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from forge.client.stored.pool import NO_ROOM_KEY
from forge.core.errors import ForgeError
from forge.runtime.telemetry import log
from services.pool.readers import ReaderRef
from services.pool.store import PoolStore

PERIOD_S = 2.0


async def watch_room(
    store: PoolStore,
    readers: ReaderRef,
    metadata: dict[str, str],
    announce: Callable[[], Awaitable[None]],
) -> None:
    """Keeps the reason in `metadata` until it is cancelled; `announce` is called at each change."""
    while True:
        try:
            reason = await readers.run(lambda: store.lack_of_room)
            if reason != metadata.get(NO_ROOM_KEY, ""):
                metadata[NO_ROOM_KEY] = reason
                log.warning("turns_refused" if reason else "turns_accepted", reason=reason)
                await announce()
        except (ForgeError, OSError) as error:
            # The shard serves without it.
            log.warning("room_not_announced", pool_shard=store.shard, error=str(error))
        await asyncio.sleep(PERIOD_S)
