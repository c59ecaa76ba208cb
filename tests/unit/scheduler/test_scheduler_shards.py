"""What the leader asks of pool shards, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forge.core.errors import DeadlineExceeded, StaleFence, Unavailable
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.shards import Change, PoolShards


class HangingPool:
    """A remote whose only shard sends two groups, and then nothing."""

    async def pick(self, **_: Any) -> tuple[None, HangingPool]:
        return None, self

    async def ScanGroups(
        self, request: pool_pb2.ScanGroupsRequest
    ) -> AsyncIterator[pool_pb2.ScanGroupsResponse]:
        yield pool_pb2.ScanGroupsResponse(more=[pool_pb2.ScanGroupsResponse()])
        await asyncio.Event().wait()


async def test_shard_that_stops_in_the_middle_of_a_scan_does_not_hold_up_the_office() -> None:
    """A leader that waited for ever would keep every other from taking over."""
    scan = PoolShards(None, HangingPool(), None, timeout_s=0.05).scan("s0")
    await anext(scan)
    await anext(scan)
    with pytest.raises(DeadlineExceeded, match=r"pool shard s0 sent nothing for 0\.05 s"):
        await anext(scan)


class FencedPool:
    """A remote whose every shard has heard of a newer leader."""

    async def call(self, *_: Any, **__: Any) -> None:
        raise StaleFence("fence 1 is stale: a leader with fence 2 has written")


class Asleep:
    """A leadership that was lost while nobody looked."""

    alive = True
    fence = 1


async def test_write_of_a_leader_that_was_deposed_is_for_another_to_make() -> None:
    """FAILED_PRECONDITION would tell a trainer that its step is wrong, and an operator to give
    up; UNAVAILABLE sends both to the leader."""
    shards = PoolShards(None, FencedPool(), Asleep(), timeout_s=1.0)
    with pytest.raises(Unavailable, match="does not lead any more"):
        await shards.set_states({"s0": [Change(task_id="a")]})
    with pytest.raises(Unavailable, match="does not lead any more"):
        await shards.put("s0", [common_pb2.GroupRecord()])
