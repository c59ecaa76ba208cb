"""Leaders that die, freeze and come back; pool shards that go and join. Real processes."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forge.core.errors import NotFound, StaleFence, Unavailable
from forge.core.placement.sharding import choose_shard
from forge.runtime.coordination import Coordinator, Instance
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import (
    START_S,
    SchedulerCluster,
    assert_counts_balance,
    ids_of,
    make_task,
)

pytestmark = pytest.mark.faults


async def test_standby_takes_over_from_a_killed_leader_with_all_work_in_flight(
    forge: SchedulerCluster,
) -> None:
    """SIGKILL between two steps: trained groups stay trained, sealed ones are trained next, running
    rollouts keep their claims, and the open batch is committed by its groups."""
    leader = forge.start_scheduler(lease_ttl_s="4", takeover_hold_s="1")
    first = await forge.leader()
    forge.start_scheduler(lease_ttl_s="4", takeover_hold_s="1")
    await forge.submit([make_task(name, size=2) for name in "abcdef"])
    await forge.complete(4)
    trained = await forge.take()
    await forge.commit(trained, 1)
    await forge.complete(4)
    open_batch = await forge.take()
    running = await forge.lease(3)
    await forge.seal(running[0])

    leader.kill()
    second = await forge.leader(other_than=first.instance_id)
    assert second.instance_id == "scheduler-1"
    assert await forge.renew(running[1:]) == []
    await forge.commit(open_batch, 2)
    await forge.seal(running[1])
    await forge.finish(running[:2])
    status = await forge.status()
    assert (status.trained, status.head) == (4, 4)
    assert status.running_rollouts == 1
    assert_counts_balance(status)
    (fresh,) = await forge.lease(1)
    assert (fresh.task.task_id, fresh.rollout_index) == ("f", 1)
    await forge.seal(running[2])
    await forge.seal(fresh)
    await forge.finish([running[2], fresh])
    assert ids_of(await forge.take()) == ["e", "f"]


async def test_batch_undone_by_a_rewind_stays_void_under_the_next_leader(
    forge: SchedulerCluster,
) -> None:
    """Rewind, then SIGKILL: the new leader refuses the step that is in no surviving checkpoint, and
    its groups are trained once."""
    leader = forge.start_scheduler()
    first = await forge.leader()
    forge.start_scheduler()
    await forge.submit([make_task(name) for name in "ab"])
    await forge.complete(2)
    replaced = await forge.take()
    await forge.ask("Rewind", scheduler_pb2.RewindRequest(step=0))
    await forge.kill(leader)
    await forge.leader(other_than=first.instance_id)
    with pytest.raises(NotFound, match="were returned"):
        await forge.commit(replaced, 1)
    surviving = await forge.take(trainer="successor")
    assert ids_of(surviving) == ids_of(replaced)
    await forge.commit(surviving, 1)
    assert (await forge.status()).trained == 2


async def test_half_of_a_commit_is_undone_by_its_trainers_rewind(forge: SchedulerCluster) -> None:
    """One shard stored its part, the other was down, and the trainer went back: no part of the step
    is stored, under any leader."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    leader = forge.start_scheduler(queue={"window": "8"})
    first = await forge.leader()
    await forge.submit([make_task(f"task-{i}") for i in range(8)])
    await forge.complete(8)
    batch = await forge.take(groups=8)
    assert {group.group.pool_shard for group in batch.groups} == {"s0", "s1"}
    await forge.kill(forge.pools["s1"])
    request = scheduler_pb2.CommitBatchRequest(
        batch_id=batch.batch_id, step=1, task_ids=ids_of(batch)
    )
    with pytest.raises(Unavailable, match="s1"):
        await forge.ask("CommitBatch", request, retry_for_s=0.0)
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    await forge.ask("Rewind", scheduler_pb2.RewindRequest(step=0))
    await forge.kill(leader)
    forge.start_scheduler(queue={"window": "8"})
    await forge.leader(other_than=first.instance_id)
    status = await forge.status()
    assert (status.trained, status.pending) == (0, 8)
    assert_counts_balance(status)


async def test_pause_outlives_the_leader(forge: SchedulerCluster) -> None:
    """SIGKILL: the new leader, in another mode, leases nothing until a resume."""
    leader = forge.start_scheduler()
    first = await forge.leader()
    await forge.submit([make_task("a")])
    paused = scheduler_pb2.SetActivityRequest(activity=scheduler_pb2.ACTIVITY_PAUSED)
    await forge.ask("SetActivity", paused)
    await forge.kill(leader)
    forge.start_scheduler(queue={"mode": "adaptive", "window": "0"})
    await forge.leader(other_than=first.instance_id)
    status = await forge.status()
    assert (status.activity, status.mode) == (scheduler_pb2.ACTIVITY_PAUSED, "adaptive")
    assert status.running_limit == 8, "N: less than eight steps of 2 groups"
    assert await forge.lease(1, wait_s=0.0) == []
    resumed = scheduler_pb2.SetActivityRequest(activity=scheduler_pb2.ACTIVITY_RUNNING)
    await forge.ask("SetActivity", resumed)
    await forge.complete(1)
    assert ids_of(await forge.take(groups=1)) == ["a"]


async def test_queue_metrics_are_those_of_the_leader(forge: SchedulerCluster) -> None:
    """Scraped from each instance: the sums of the cluster are right before and after SIGKILL."""
    leader = forge.start_scheduler()
    first = await forge.leader()
    forge.start_scheduler()
    (second,) = await forge.coordinator.discover("scheduler").wait(
        timeout_s=START_S, where=lambda instance: instance.metadata["leader"] == "false"
    )
    await forge.submit([make_task(name) for name in "abcd"])
    await forge.complete(3)
    await forge.commit(await forge.take(), 1)
    states = {"accepted": 4, "trained": 2, "tombstoned": 0, "pending": 2, "queued": 1}
    states |= {"running": 0, "complete_in_window": 1, "complete_outside_window": 0}

    async def shown(instance: Instance) -> bool:
        return await group_gauges(instance) == states

    await until(lambda: shown(first))
    assert not any((await group_gauges(second)).values())
    await forge.kill(leader)
    await until(lambda: shown(second))


async def group_gauges(instance: Instance) -> dict[str, float]:
    """Groups by state, as Prometheus reads them."""
    url = f"http://{instance.metadata['metrics']}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["forge_scheduler_groups"].samples
    return {sample.labels["state"]: sample.value for sample in samples}


async def test_standby_answers_unavailable_and_names_the_leader(forge: SchedulerCluster) -> None:
    """A client that called the wrong instance learns the address."""
    forge.start_scheduler()
    leader = await forge.leader()
    forge.start_scheduler()
    (standby,) = await forge.coordinator.discover("scheduler").wait(
        timeout_s=START_S, where=lambda instance: instance.metadata["leader"] == "false"
    )
    request = scheduler_pb2.GetSchedulerStatusRequest()
    with pytest.raises(Unavailable, match=f"is a standby; the leader is {leader.address}"):
        await forge.ask_instance(standby, "GetSchedulerStatus", request)


async def test_frozen_leader_is_deposed_and_its_writes_are_refused(
    forge: SchedulerCluster,
) -> None:
    """SIGSTOP for longer than the TTL: another instance leads, and when the frozen one continues,
    in the middle of a commit, its state is dropped and its writes are refused."""
    frozen = forge.start_scheduler(lease_ttl_s="3")
    old = await forge.leader()
    await forge.submit([make_task(name) for name in "abcd"])
    await forge.complete(4)
    batch = await forge.take()
    forge.start_scheduler()
    frozen.freeze()
    commit = asyncio.create_task(
        forge.ask_instance(
            old,
            "CommitBatch",
            scheduler_pb2.CommitBatchRequest(
                batch_id=batch.batch_id, step=9, task_ids=ids_of(batch)
            ),
        )
    )
    await forge.leader(other_than=old.instance_id)
    await forge.gone(old.instance_id)
    retaken = await forge.take(trainer="another")
    assert ids_of(retaken) == ids_of(batch)
    frozen.thaw()
    with pytest.raises(Unavailable):
        await commit
    await forge.commit(retaken, 1)
    states = {group.group.task.task_id: group.group.step for group in await forge.groups()}
    assert states == {"a": 1, "b": 1, "c": 0, "d": 0}
    with pytest.raises(NotFound, match="discard the step"):
        await forge.commit(batch, 9)
    assert_counts_balance(await forge.status())


async def test_pool_refuses_the_fence_of_an_earlier_leader(forge: SchedulerCluster) -> None:
    """Even a leader that does not notice its end cannot write: the new one raised the fence
    first."""
    first = forge.start_scheduler()
    old = await forge.leader()
    await forge.submit([make_task("a")])
    (began,) = first.logged("term_began")
    await forge.kill(first)
    forge.start_scheduler()
    await forge.leader(other_than=old.instance_id)
    change = pool_pb2.SetGroupStatesRequest.Change(
        task_id="a", state=common_pb2.GROUP_STATE_TRAINED, step=1
    )
    late = pool_pb2.SetGroupStatesRequest(changes=[change], fence=began["fence"])
    with pytest.raises(StaleFence):
        await forge.ask_pool("s0", "SetGroupStates", late)


async def test_stopped_leader_resigns_at_once(forge: SchedulerCluster) -> None:
    """SIGTERM: the standby need not wait for the TTL, nor for claims of other leaders."""
    first = forge.start_scheduler(takeover_hold_s="60")
    old = await forge.leader()
    forge.start_scheduler(takeover_hold_s="60")
    await forge.submit([make_task("a")])
    assert first.terminate() == 0
    await forge.leader(other_than=old.instance_id)
    (lease,) = await forge.lease(1)
    assert lease.task.task_id == "a"


async def test_new_shard_gets_only_new_groups(forge: SchedulerCluster) -> None:
    """A pool shard that joins in the middle of a run is used at once; no group moves."""
    forge.start_scheduler(queue={"concurrency": "64"})
    await forge.submit([make_task(f"old-{i}") for i in range(8)])
    forge.start_pool("s1")
    leader = forge.schedulers[0]
    await leader.until_logged("pool_shard_registered", times=2)
    await forge.submit([make_task(f"new-{i}") for i in range(16)])
    shards = {g.group.task.task_id: g.group.pool_shard for g in await forge.groups()}
    assert {shard for task_id, shard in shards.items() if task_id.startswith("old")} == {"s0"}
    assert {shard for task_id, shard in shards.items() if task_id.startswith("new")} == {"s0", "s1"}
    await forge.complete(24)
    batch = await forge.take(groups=4)
    await forge.commit(batch, 1)
    assert_counts_balance(await forge.status())


async def test_outage_of_one_shard_delays_only_its_own_groups(forge: SchedulerCluster) -> None:
    """Leases and batches of the other shard continue; when it is back, so are its groups."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    scheduler = forge.start_scheduler(queue={"rollout_lease_s": "4", "window": "8"})
    await forge.submit([make_task(f"task-{i}") for i in range(8)])
    shards = {g.group.task.task_id: g.group.pool_shard for g in await forge.groups()}
    assert set(shards.values()) == {"s0", "s1"}
    orphans = [lease for lease in await forge.lease(8) if shards[lease.task.task_id] == "s1"]
    await forge.kill(forge.pools["s1"])
    live = sum(shard == "s0" for shard in shards.values())
    await forge.complete_until(groups=live)
    batch = await forge.take(groups=8)
    assert {task_id for task_id, shard in shards.items() if shard == "s0"} == set(ids_of(batch))
    await forge.commit(batch, 1)
    status = await forge.status()
    assert (status.tombstoned, status.pending) == (0, len(orphans))

    forge.start_pool("s1")
    await forge.seal(orphans[0])
    await forge.complete_until(groups=len(orphans))
    batch = await forge.take(groups=8)
    assert {task_id for task_id, shard in shards.items() if shard == "s1"} == set(ids_of(batch))
    assert not scheduler.logged("group_tombstoned")
    assert_counts_balance(await forge.status())


async def test_head_starts_after_an_outage_in_which_groups_overtook_it(
    forge: SchedulerCluster,
) -> None:
    """Complete groups beyond the window count against N, and the head starts all the same."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    scheduler = forge.start_scheduler(queue={"concurrency": "4", "window": "2"})
    names = [f"task-{i}" for i in range(40)]
    away = [name for name in names if choose_shard(name, {"s0", "s1"}) == "s1"][:4]
    there = [name for name in names if choose_shard(name, {"s0", "s1"}) == "s0"][:4]
    await forge.submit([make_task(name) for name in (*away, *there)])
    await forge.kill(forge.pools["s1"])
    # Claims that it handed out before would keep the others waiting.
    await scheduler.until_logged("pool_shards_away")
    await forge.complete_until(groups=4)
    forge.start_pool("s1")
    for step, expected in ((1, away[:2]), (2, away[2:]), (3, there[:2])):
        if expected[0] in away:
            await forge.complete(2)
        batch = await forge.take(groups=2)
        assert ids_of(batch) == expected
        await forge.commit(batch, step)


async def test_leader_stops_while_etcd_is_frozen_and_leads_again(
    tmp_path: Path, own_etcd: EtcdServer, cluster: str
) -> None:
    """Without etcd no instance can be sure to lead; afterwards the state is as before."""
    coordinator = await Coordinator.connect(own_etcd.endpoint, cluster=cluster)
    forge = SchedulerCluster(tmp_path, etcd=own_etcd, cluster=cluster, coordinator=coordinator)
    try:
        forge.start_pool()
        scheduler = forge.start_scheduler(lease_ttl_s="3")
        await forge.submit([make_task("a"), make_task("b")])
        await forge.complete(2)
        leader = await forge.leader()
        lost, begun = (len(scheduler.logged(e)) for e in ("leadership_lost", "term_began"))
        own_etcd.freeze()
        await scheduler.until_logged("leadership_lost", times=lost + 1)
        request = scheduler_pb2.GetSchedulerStatusRequest()
        with pytest.raises(Unavailable, match="is a standby"):
            await forge.ask_instance(leader, "GetSchedulerStatus", request)
        own_etcd.thaw()
        assert ids_of(await forge.take()) == ["a", "b"]
        assert len(scheduler.logged("term_began")) > begun
    finally:
        own_etcd.thaw()
        await forge.close()
        await coordinator.close()


async def test_priority_outlives_the_leader(forge: SchedulerCluster) -> None:
    """It is stored with the task: the next leader starts groups in the same order."""
    leader = forge.start_scheduler()
    first = await forge.leader()
    urgent = make_task("c")
    urgent.priority = 2
    await forge.submit([make_task("a"), make_task("b"), urgent])
    await forge.kill(leader)
    forge.start_scheduler()
    await forge.leader(other_than=first.instance_id)
    leases = await forge.lease(3)
    assert [lease.task.task_id for lease in leases] == ["c", "a", "b"]
