"""The life of one instance of a replicated shard, beyond what its leader and its link tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.pool.config import PoolConfig
from services.pool.following import Following
from services.pool.readers import Readers
from services.pool.replica import Replica
from tests.support.pool_replicas import Node


class Elsewhere:
    """An etcd by whose record others are in sync."""

    async def get(self, key: str) -> Any:
        value = b'{"lineage": "lineage", "in_sync": ["another"], "fence": 1}'
        return SimpleNamespace(value=value, mod_revision=1)


async def test_a_defect_in_following_ends_the_process(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that neither follows nor may lead would be of no use: a fresh one follows."""

    async def crash(self: Following) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(Following, "run", crash)
    stopped, readers = asyncio.Event(), Readers(1)
    context: Any = SimpleNamespace(
        config=PoolConfig(),
        coordinator=Elsewhere(),
        remote=lambda kind, stub: None,
        stop=stopped.set,
    )
    replica = Replica(context, node("a").store, None, readers, on_lead=lambda: None)
    await replica.start()
    async with asyncio.timeout(10):
        await stopped.wait()
    await replica.stop()
    await readers.close()
