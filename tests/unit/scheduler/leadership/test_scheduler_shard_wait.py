"""The wait of an elected scheduler for the pool shards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from services.scheduler.leadership import recovery
from services.scheduler.leadership.recovery import ANY, wait_for_shards
from services.scheduler.shards.pool_shards import PoolShards
from tests.support.runtime.waiting import settle


class Shards:
    """The shards in discovery."""

    def __init__(self) -> None:
        self._live: frozenset[str] = frozenset()
        self._next = asyncio.Event()

    def live(self) -> frozenset[str]:
        return self._live

    def changed(self) -> Coroutine[Any, Any, object]:
        return self._next.wait()

    def join(self, shard: str) -> None:
        self._live |= {shard}
        self._next.set()
        self._next = asyncio.Event()


@pytest.mark.parametrize("known", [frozenset[str](), frozenset({"s0", "s1"})])
async def test_shard_that_joins_while_its_absence_is_stored_is_seen_at_once(
    known: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The absence is written to etcd, which takes time: the change must not be lost meanwhile."""
    monkeypatch.setattr(recovery, "_REMIND_S", math.inf)
    shards = Shards()
    reported: list[frozenset[str]] = []

    async def awaiting(missing: frozenset[str]) -> None:
        reported.append(missing)
        await settle()
        if missing:
            shards.join(min(missing) if known else "s0")

    async def forget_gone(shards: frozenset[str]) -> frozenset[str]:
        return frozenset()

    waiting = asyncio.create_task(
        wait_for_shards(
            cast(PoolShards, shards),
            known,
            forget_gone=forget_gone,
            declared=asyncio.Event(),
            patience_s=math.inf,
            awaiting=awaiting,
        )
    )
    await settle(1000)
    assert waiting.done(), reported
    assert waiting.result() == (known or {"s0"}, frozenset())
    assert reported[0] == (known or {ANY}) and reported[-1] == frozenset()
