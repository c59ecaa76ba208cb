"""What the leader asks of pool shards, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forge.core.errors import DeadlineExceeded, StaleFence, Unavailable
from forge.runtime.coordination import Discovery, Instance, Leadership
from forge.runtime.rpc.remote import Remote
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.shards.pool_shards import GroupStateChange, PoolShards
from tests.support.runtime.unused import unused


class HangingPool(Remote[Any]):
    """A remote whose only shard sends two groups, and then nothing."""

    def __init__(self) -> None: ...

    async def pick(self, **_: Any) -> tuple[Any, Any]:
        return None, self

    async def ScanGroups(
        self, request: pool_pb2.ScanGroupsRequest
    ) -> AsyncIterator[pool_pb2.ScanGroupsResponse]:
        yield pool_pb2.ScanGroupsResponse(more=[pool_pb2.ScanGroupsResponse()])
        await asyncio.Event().wait()


async def test_shard_that_stops_in_a_scan_does_not_block_the_leader() -> None:
    """A leader that waited forever would block the next election."""
    scan = PoolShards(unused(Discovery), HangingPool(), unused(Leadership), timeout_s=0.05).scan(
        "s0"
    )
    await anext(scan)
    await anext(scan)
    with pytest.raises(DeadlineExceeded, match=r"pool shard s0 sent nothing for 0\.05 s"):
        await anext(scan)


class FencedPool(Remote[Any]):
    """A remote whose every shard has heard of a newer leader."""

    def __init__(self) -> None: ...

    async def call(self, *_: Any, **__: Any) -> None:
        raise StaleFence("fence 1 is stale: a leader with fence 2 has written")


class Asleep(Leadership):
    """A leadership that was lost while nobody looked."""

    def __init__(self) -> None:
        self.fence = 1

    @property
    def alive(self) -> bool:
        return True


async def test_write_of_a_deposed_leader_is_unavailable() -> None:
    """FAILED_PRECONDITION would tell a trainer that its step is wrong, and an operator to stop;
    UNAVAILABLE sends both to the leader."""
    shards = PoolShards(unused(Discovery), FencedPool(), Asleep(), timeout_s=1.0)
    with pytest.raises(Unavailable, match="is no longer the leader"):
        await shards.set_states({"s0": [GroupStateChange(task_id="a")]})
    with pytest.raises(Unavailable, match="is no longer the leader"):
        await shards.put_groups("s0", [common_pb2.GroupRecord()])


class Registered(Discovery):
    """A directory of pool shards."""

    def __init__(self, *shards: str) -> None:
        self.instances = tuple(
            Instance(kind="pool", instance_id=s, address="", metadata={"shard": s}, revision=1)
            for s in shards
        )


class KnowingPool(Remote[Any]):
    """A remote whose shards look up two ids in a call, or are away."""

    def __init__(self, *, away: str = "") -> None:
        self.away = away
        self.calls = 0

    async def call(self, method: str, request: Any, **options: Any) -> Any:
        self.calls += 1
        (instance,) = filter(options["where"], Registered("s0", "s1").instances)
        shard = instance.metadata["shard"]
        if shard == self.away:
            raise DeadlineExceeded("no answer")
        ids = [*request.task_ids, *request.batch_ids][:2]
        answer = pool_pb2.LookUpGroupsResponse(answered=len(ids))
        for each in ids:
            if each in request.batch_ids and shard == "s1":
                answer.commits.add(batch_id=each, step=7)
            elif each.startswith(shard):
                answer.groups.add(task=common_pb2.Task(task_id=each))
        return answer


async def look_up(pool: KnowingPool, *task_ids: str, live: tuple[str, ...] = ("s0", "s1")) -> Any:
    shards = PoolShards(Registered(*live), pool, unused(Leadership), timeout_s=1.0)
    return await shards.look_up({"s0", "s1"}, task_ids=task_ids, batch_ids=["batch-0-1"])


async def test_ids_are_looked_up_on_every_shard() -> None:
    """In as many calls as a shard needs."""
    pool = KnowingPool()
    groups, commits = await look_up(pool, "s0-a", "s1-a", "s0-b", "new")
    assert sorted(groups) == ["s0-a", "s0-b", "s1-a"]
    assert commits == {"batch-0-1": 7}
    assert pool.calls == 6


@pytest.mark.parametrize("live", [("s0", "s1"), ("s1",)])
async def test_silent_shard_leaves_only_missing_ids_unknown(
    live: tuple[str, ...],
) -> None:
    """Groups of the other shards are known."""
    groups, _ = await look_up(KnowingPool(away="s0"), "s1-a", live=live)
    assert list(groups) == ["s1-a"]
    with pytest.raises(Unavailable, match="pool shard s0"):
        await look_up(KnowingPool(away="s0"), "s1-a", "new", live=live)
