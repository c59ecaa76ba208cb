"""A standby takes over with its copies of the pool's shards. Real processes."""

from __future__ import annotations

import pytest

from tests.support.scheduler.cluster import (
    START_S,
    SchedulerCluster,
    SchedulerProcess,
    assert_counts_balance,
    make_task,
)

pytestmark = pytest.mark.faults


async def test_standby_scans_only_later_changes(
    forge: SchedulerCluster,
) -> None:
    """Also one that led before and was deposed, and with a shard that restarted between two scans:
    each has exactly the queue of the leader before it."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    first = forge.start_scheduler()
    old = await forge.leader()
    earlier = len(first.logged("pool_shard_scanned"))
    await forge.submit([make_task(f"t{number}") for number in range(40)])
    second = forge.start_scheduler()
    await second.until_logged("pool_shard_scanned", times=2)
    await forge.complete(2)
    await forge.commit(await forge.take(), 1)
    first.freeze()
    await forge.end_leases(first.id_ending)
    new = await forge.leader(other_than=old.instance_id)
    assert sum(groups_read(second)) < 40
    await forge.complete(2)
    await forge.commit(await forge.take(), 2)
    first.thaw()
    await first.until_logged("pool_shard_scanned", times=earlier + 2)
    await forge.kill(forge.pools["s0"])
    forge.start_pool("s0")
    await first.until_logged("pool_shard_scanned", times=earlier + 3)
    before = await forge.status()
    await forge.kill(second)
    await forge.leader(other_than=new.instance_id)
    after = await forge.status()
    assert (after.trained, after.head, after.accepted) == (4, before.head, 40)
    assert sum(groups_read(first)[-2:]) < 40
    assert_counts_balance(after)


def groups_read(process: SchedulerProcess) -> list[int]:
    """Groups that it asked for once it was elected, by shard."""
    return [entry["groups_read"] for entry in process.logged("pool_shard_registered")]
