"""An erasure reaches the leader that runs: its groups leave the queue, with their leases."""

from __future__ import annotations

from forge.v1 import pool_pb2, scheduler_pb2
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import SchedulerCluster, assert_counts_balance, make_task


async def erase(forge: SchedulerCluster, *task_ids: str) -> None:
    await forge.ask_pool(
        "s0", "EraseTrajectories", pool_pb2.EraseTrajectoriesRequest(task_ids=task_ids)
    )


async def status_of(forge: SchedulerCluster) -> scheduler_pb2.GetSchedulerStatusResponse:
    """With the reasons of tombstones."""
    request = scheduler_pb2.GetSchedulerStatusRequest(with_tombstones=True)
    status: scheduler_pb2.GetSchedulerStatusResponse = await forge.ask(
        "GetSchedulerStatus", request
    )
    assert_counts_balance(status)
    return status


async def test_running_leader_drops_erased_groups(forge: SchedulerCluster) -> None:
    """Queued, running and complete ones; the head moves on, the next batch has none of them. After
    a restart of the shard, which forgets what changed before, the leader learns of the next one."""
    forge.start_scheduler()
    await forge.submit([make_task(name) for name in "abcdef"])
    complete, running = await forge.lease(2)
    await forge.seal(complete)
    await forge.finish([complete])

    async def tombstoned(groups: int) -> bool:
        return (await status_of(forge)).tombstoned == groups

    await erase(forge, "a", "b", "c")
    await until(lambda: tombstoned(3))
    status = await status_of(forge)
    assert [(each.reason, each.groups) for each in status.tombstones] == [("erased", 3)]
    assert status.head == 3
    assert await forge.renew([running]) == [running.lease_id]

    pool = forge.pools["s0"]
    await forge.kill(pool)
    forge.start_pool()
    await erase(forge, "d", "a", "unknown")
    await until(lambda: tombstoned(4))
    await forge.complete(2)
    assert [group.group.task.task_id for group in (await forge.take()).groups] == ["e", "f"]
