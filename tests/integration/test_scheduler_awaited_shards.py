"""A leader that is elected while a pool shard is away. Real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forge.core.errors import Unavailable
from forge.core.placement.sharding import choose_shard
from forge.v1 import scheduler_pb2
from services.scheduler.term_record import TermRecord
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import (
    START_S,
    SchedulerCluster,
    assert_counts_balance,
    ids_of,
    make_task,
)


async def test_new_leader_begins_without_an_unreachable_shard(forge: SchedulerCluster) -> None:
    """The other shard's groups are trained; calls for groups that may be on the unreachable shard
    wait for it, and find them when it is back: groups, and the claims of runners on them."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    first = forge.start_scheduler(queue={"window": "8"})
    await forge.submit([make_task(f"task-{i}") for i in range(8)])
    shards = {g.group.task.task_id: g.group.pool_shard for g in await forge.groups()}
    claims = await forge.lease(8)
    lost = [claim for claim in claims if shards[claim.task.task_id] == "s1"]
    there = [claim for claim in claims if shards[claim.task.task_id] == "s0"]
    assert lost and there
    # It keeps a bound on the head from the start of its term on.

    async def has_head() -> bool:
        return (await TermRecord.read(forge.coordinator)).head is not None

    await until(has_head)
    await forge.kill(first)
    await forge.kill(forge.pools["s1"])
    second = forge.start_scheduler(
        queue={"window": "8", "rollout_lease_s": "120"}, shard_wait_s="0.5"
    )
    status = await forge.status()
    assert (status.pending, list(status.shards_away)) == (len(there), ["s1"])
    assert await forge.renew(claims) == []
    for claim in there:
        await forge.seal(claim)
    await forge.finish(there)
    batch = await forge.take(groups=8)
    assert set(ids_of(batch)) <= {claim.task.task_id for claim in there}
    await forge.commit(batch, 1)
    with pytest.raises(Unavailable, match="pool shard s1, which is awaited"):
        request = scheduler_pb2.SubmitTasksRequest(tasks=[make_task("another")])
        await forge.ask("SubmitTasks", request, retry_for_s=0.0)

    forge.start_pool("s1")
    await second.until_logged("pool_shard_registered", times=2)

    async def all_there() -> bool:
        return not (await forge.status()).shards_away

    await until(all_there)
    status = await forge.status()
    assert status.pending == 8 - len(ids_of(batch))
    assert status.running_rollouts == len(lost), "runners keep what they renewed meanwhile"
    for claim in lost:
        await forge.seal(claim)
    await forge.finish(lost)
    assert await forge.submit([make_task("another")]) == 1
    assert_counts_balance(await forge.status())


async def test_leader_waits_for_all_shards_without_a_bound_on_the_head(
    forge: SchedulerCluster,
) -> None:
    """The record of an earlier version has no bound: groups of the shard could be passed."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    first = forge.start_scheduler()
    await forge.submit([make_task(f"task-{i}") for i in range(8)])
    await forge.kill(first)
    await forge.kill(forge.pools["s1"])
    record = await TermRecord.read(forge.coordinator)
    await replace(record, head=None).write(forge.coordinator)
    second = forge.start_scheduler(shard_wait_s="0")
    # It may know of no shard at first.
    await until(
        lambda: ["s1"] in [one["missing"] for one in second.logged("waiting_for_pool_shards")]
    )
    schedulers = forge.coordinator.discover("scheduler")
    while not any(i.metadata.get("awaits_shards") == "s1" for i in schedulers.instances):
        await schedulers.changed()
    forge.start_pool("s1")
    assert (await forge.status()).pending == 8


async def test_queue_indices_of_an_awaited_shard_are_not_used_again(
    forge: SchedulerCluster,
) -> None:
    """The window would take two groups of one index for one and never train the second."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    first = forge.start_scheduler()
    names = (f"last-{number}" for number in range(100))
    last = next(name for name in names if choose_shard(name, {"s0", "s1"}) == "s1")
    await forge.submit([make_task(name) for name in ("a", "b", "c", last)])

    async def head_is_noted() -> bool:
        return (await TermRecord.read(forge.coordinator)).head is not None

    await until(head_is_noted)
    await forge.kill(first)
    await forge.kill(forge.pools["s1"])
    forge.start_scheduler(shard_wait_s="0")
    await forge.status()
    forge.start_pool("s1")
    assert await forge.submit([make_task("new")]) == 1
    indices = [one.group.queue_index for one in await forge.groups()]
    assert sorted(indices) == [0, 1, 2, 3, 4]
