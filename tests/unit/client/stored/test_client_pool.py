"""Reading the pool: a shard that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forge.client.stored.pool import PoolReader
from forge.core.errors import DeadlineExceeded
from forge.v1 import pool_pb2


class HangingPool:
    """Stands in for the Remote of a pool whose one shard sends nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def pick(self, **_: Any) -> tuple[None, HangingPool]:
        return None, self

    async def FetchTrajectories(
        self, request: pool_pb2.FetchTrajectoriesRequest
    ) -> AsyncIterator[pool_pb2.FetchTrajectoriesResponse]:
        await asyncio.Event().wait()
        yield pool_pb2.FetchTrajectoriesResponse()


async def test_fetch_from_a_hung_shard_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that waited forever would not give the reason."""
    monkeypatch.setattr("forge.client.stored.pool.Remote", HangingPool)
    monkeypatch.setattr("forge.client.stored.pool.CALL_S", 0.01)
    reader: Any = PoolReader
    with pytest.raises(DeadlineExceeded, match=r"pool shard s0 sent nothing for 0\.01 s"):
        async for _ in reader(None, None, retry_for_s=0.0).fetch("s0", ["a:0:0"], on_damage=print):
            pass
