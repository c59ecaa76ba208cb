"""The wait for a pool shard: short for an unknown one, long for one that restarts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge.core.errors import Unavailable
from forge.runtime.security.tokens import Claims
from forge.v1 import pool_pb2
from services.gateway.pool_client import Pool

CLAIMS = Claims(subject="t:0:0", scopes=frozenset(), trajectory_id="t:0:0", pool_shard="s0")


class Shards:
    """A remote that has the shard or not."""

    def __init__(self) -> None:
        self.serves = False
        self.waits: list[float] = []

    def instances(self) -> tuple[()]:
        return ()

    async def pick(self, *, where: Any, timeout_s: float) -> Any:
        self.waits.append(timeout_s)
        if not self.serves:
            raise Unavailable("0 of 1 fitting pool instances")
        return None, None

    async def call(self, *args: Any, **fields: Any) -> pool_pb2.GetSummariesResponse:
        return pool_pb2.GetSummariesResponse()


async def test_only_a_recently_served_shard_is_awaited() -> None:
    """`pool_wait_s` for an unknown shard and one that is gone for long; `pool_timeout_s` for one
    that restarts."""
    now = SimpleNamespace(s=1000.0)
    shards = Shards()

    async def gone(shard: str) -> str:
        return ""

    pool = Pool(cast(Any, shards), timeout_s=30.0, wait_s=2.0, gone=gone, clock=lambda: now.s)
    with pytest.raises(Unavailable, match="no instance serves pool shard 's0'"):
        await pool.fetch(CLAIMS)
    shards.serves = True
    await pool.fetch(CLAIMS)
    shards.serves = False
    now.s += 29.0
    with pytest.raises(Unavailable):
        await pool.fetch(CLAIMS)
    now.s += 2.0
    with pytest.raises(Unavailable):
        await pool.fetch(CLAIMS)
    assert shards.waits == [2.0, 2.0, 30.0, 2.0]
