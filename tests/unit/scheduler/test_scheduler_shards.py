"""What the leader asks of pool shards, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forge.core.errors import Unavailable
from forge.v1 import pool_pb2
from services.scheduler.shards import PoolShards


class HangingPool:
    """A remote whose only shard sends two groups, and then nothing."""

    async def pick(self, **_: Any) -> tuple[None, HangingPool]:
        return None, self

    async def ScanGroups(
        self, request: pool_pb2.ScanGroupsRequest
    ) -> AsyncIterator[pool_pb2.ScanGroupsResponse]:
        for _ in range(2):
            yield pool_pb2.ScanGroupsResponse()
        await asyncio.Event().wait()


async def test_shard_that_stops_in_the_middle_of_a_scan_does_not_hold_up_the_office() -> None:
    """A leader that waited for ever would keep every other from taking over."""
    scan = PoolShards(None, HangingPool(), None, timeout_s=0.05).scan("s0")
    await anext(scan)
    await anext(scan)
    with pytest.raises(Unavailable, match=r"shard s0 sent none of its groups for 0\.05 s"):
        await anext(scan)
