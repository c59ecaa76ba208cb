"""The wait for a pool shard, short for an unknown one, long for one that restarts; the way to a
group that has moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge.core.errors import FailedPrecondition, Unavailable
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, pool_pb2
from services.gateway.pool_client import Pool

CLAIMS = Claims(
    subject="t:0:0",
    scopes=frozenset(),
    task_id="t",
    trajectory_id="t:0:0",
    pool_shard="s0",
)


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


class MovedGroup:
    """Shards s0 to s2: the group is on s2, came by s1, and s0 has refused writes since."""

    targets = {"s0": "s1", "s1": "s2"}

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def instances(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(metadata={"shard": shard}) for shard in ("s0", "s1", "s2")]

    def shard(self, where: Any) -> str:
        (found,) = filter(where, self.instances())
        return str(found.metadata["shard"])

    async def pick(self, *, where: Any, timeout_s: float) -> Any:
        return None, SimpleNamespace(FetchTrajectories=lambda *_, **__: self.fetch(where))

    async def call(self, method: str, request: Any, *, where: Any, **_: Any) -> Any:
        shard = self.shard(where)
        self.calls.append((shard, method))
        match method:
            case "LookUpGroups":
                group = common_pb2.GroupRecord(task=common_pb2.Task(task_id="t"))
                if shard in self.targets:
                    group.state = common_pb2.GROUP_STATE_MOVED
                    group.reason = self.targets[shard]
                return pool_pb2.LookUpGroupsResponse(groups=[group])
            case "GetSummaries":
                sealed = common_pb2.TrajectorySummary(state=common_pb2.TRAJECTORY_STATE_SEALED)
                return pool_pb2.GetSummariesResponse(summaries=[sealed])
            case _ if shard in self.targets:
                raise FailedPrecondition(f"group t moved to pool shard {self.targets[shard]}")
            case _:
                return pool_pb2.SealTrajectoryResponse()

    async def fetch(self, where: Any) -> Any:
        trajectory = common_pb2.Trajectory(task_id=self.shard(where)).SerializeToString()
        chunk = common_pb2.Chunk(data=trajectory, last=True)
        yield pool_pb2.FetchTrajectoriesResponse(trajectory=chunk)


async def test_writes_and_reads_of_a_moved_group_reach_its_present_shard() -> None:
    """A late reward, the deletion of a response, a repeated seal; and a session that is read back
    has them all."""
    shards = MovedGroup()

    async def gone(shard: str) -> str:
        return ""

    pool = Pool(cast(Any, shards), timeout_s=30.0, wait_s=2.0, gone=gone)
    await pool.annotate(CLAIMS, [])
    assert shards.calls[-1] == ("s2", "AppendRewards")
    await pool.seal(CLAIMS, turns=1, rewards=[], abandon_reason="", closing_agent_s=None)
    assert shards.calls[-1] == ("s2", "SealTrajectory")
    found = await pool.fetch(CLAIMS)
    assert found is not None and found.task_id == "s2"
