"""A trajectory that a real pool cannot read any more, under a real scheduler."""

from __future__ import annotations

import pytest

from forge.v1 import common_pb2, pool_pb2
from tests.support.pool.records import damage, make_reward
from tests.support.scheduler.cluster import SchedulerCluster, make_task

pytestmark = pytest.mark.faults


async def test_damaged_trajectory_costs_only_its_group(forge: SchedulerCluster) -> None:
    """The others are trained, the ledger has the reason, and a new leader takes over."""
    leader = forge.start_scheduler()
    await forge.submit([make_task(name) for name in ("a", "b", "c")])
    await forge.complete(3)
    reward = make_reward("late")
    reward.name = "NEEDLE"
    request = pool_pb2.AppendRewardsRequest(trajectory_id="b:0:0", rewards=[reward])
    await forge.ask_pool("s0", "AppendRewards", request)
    await forge.kill(forge.pools["s0"])
    damage(forge.pools["s0"].data_dir, b"NEEDLE")
    forge.start_pool()
    while not (batch := await forge.take(groups=3)).batch_id:
        pass
    assert [group.group.task.task_id for group in batch.groups] == ["a", "c"]
    await forge.commit(batch, 1)
    for _ in range(2):
        status = await forge.status()
        assert (status.trained, status.tombstoned, status.pending) == (2, 1, 0)
        lost = next(g for g in await forge.groups() if g.group.task.task_id == "b")
        assert lost.group.state == common_pb2.GROUP_STATE_TOMBSTONED
        assert lost.group.reason == "pool shard s0 has lost b:0:0"
        assert not lost.trajectories
        await forge.kill(leader)
        leader = forge.start_scheduler()
