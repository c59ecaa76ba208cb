"""etcd is restored from a snapshot that is older than the work of pools, schedulers and trainers.

Its revisions are lower then, and leaders of after the snapshot are unknown to it. What pools and
checkpoints know of those leaders keeps fences and numbers of terms unique.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forge.client.retry import retried
from forge.core.errors import NotFound, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.status import translated
from forge.runtime.security.tokens import Keyring
from forge.v1 import pool_pb2
from services.pool.replication.replica_set import ReplicaSet
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.leadership.lineage import ELECTION, Lineage
from tests.support.pool.records import make_group
from tests.support.pool.shard import ReplicatedShard
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import LIMIT_S, until
from tests.support.scheduler.cluster import (
    SchedulerCluster,
    assert_counts_balance,
    ids_of,
    make_task,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture
def etcd(own_etcd: EtcdServer) -> EtcdServer:
    """Coordinator and services use the etcd that a test restores."""
    return own_etcd


async def many_revisions(coordinator: Coordinator, count: int) -> None:
    """As after a while of work."""
    revision = 0
    for _ in range(count):
        revision = await coordinator.compare_and_swap(
            "config/test", b"", expected_revision=revision
        )


async def restore(etcd: EtcdServer, snapshot: Path, coordinator: Coordinator) -> None:
    """Return once etcd answers this client again: after a refusal its connection pauses, and calls
    fail at once."""
    etcd.restore(snapshot)

    async def answers() -> bool:
        try:
            await coordinator.get("config/x")
        except Unavailable:
            return False
        return True

    await until(answers)


async def test_schedulers_continue_on_an_older_etcd(
    forge: SchedulerCluster, own_etcd: EtcdServer, coordinator: Coordinator, tmp_path: Path
) -> None:
    """The new leader takes fence and term above those of the leader that etcd has forgotten: no id
    of an attempt or a batch comes twice, and the batch of that leader is void."""
    first = forge.start_scheduler()
    await forge.submit([make_task(name) for name in "abcdef"])
    await forge.complete(2)
    await forge.commit(await forge.take(), 1)
    own_etcd.save(tmp_path / "snapshot")

    await many_revisions(coordinator, 300)
    await forge.kill(first)
    second = forge.start_scheduler()
    await forge.complete(2)
    open_batch = await forge.take()
    seen = [lease.trajectory_id for lease in await forge.lease(1)]
    (began,) = await second.until_logged("term_began")

    own_etcd.restore(tmp_path / "snapshot")
    await forge.end_leases(first.id_ending)
    forge.start_scheduler()
    await second.until_logged("term_ended")
    status = await forge.status()
    assert_counts_balance(status)
    assert (status.accepted, status.trained, status.pending) == (6, 2, 4)
    with pytest.raises(NotFound):
        await forge.commit(open_batch, 2)
    batch = await forge.take()
    assert sorted(ids_of(batch)) == sorted(ids_of(open_batch))
    assert batch.batch_id != open_batch.batch_id
    await forge.commit(batch, 2)
    leases = await forge.lease(2)
    assert not {lease.trajectory_id for lease in leases} & set(seen)
    for lease in leases:
        await forge.seal(lease)
    await forge.finish(leases)
    terms = [line for one in forge.schedulers for line in one.logged("term_began")]
    assert max(line["fence"] for line in terms) > began["fence"]
    assert len({line["term"] for line in terms}) == len(terms) == 3


async def test_replicas_continue_on_an_older_etcd(
    own_etcd: EtcdServer, coordinator: Coordinator, cluster: str, tmp_path: Path
) -> None:
    """The next leader takes a term above those that the replicas know: the follower is accepted,
    and both copies have what was acknowledged."""
    Keyring.generate(tmp_path / "key")
    shard = ReplicatedShard(
        tmp_path,
        etcd=own_etcd,
        coordinator=coordinator,
        cluster=cluster,
        shard="s0",
        key_file=tmp_path / "key",
    )

    async def two_copies() -> bool:
        return (await shard.leader())[1].metadata.get("copies") == "2"

    async def put(name: str) -> None:
        request = pool_pb2.PutGroupsRequest(groups=[make_group(name)], fence=1)

        @translated()
        async def stored() -> None:
            client = await shard.client()
            try:
                await client.stub.PutGroups(request)
            finally:
                await client.close()

        # The leader of before the restore is in discovery until it is deposed.
        await retried(stored, retry_for_s=LIMIT_S)

    shard.put_before_start(make_group("first"))
    shard.start()
    keeper = asyncio.create_task(shard.keep_running())
    try:
        await until(two_copies)
        own_etcd.save(tmp_path / "snapshot")
        await many_revisions(coordinator, 300)
        killed = (await shard.leader())[0].id_ending
        await shard.kill_leader()
        shard.start()
        await until(two_copies)
        await put("second")
        before = await ReplicaSet.read(coordinator, "s0")
        assert before is not None

        await restore(own_etcd, tmp_path / "snapshot", coordinator)
        await own_etcd.end_leases(cluster, killed)

        async def led_again() -> bool:
            found = await ReplicaSet.read(coordinator, "s0")
            return found is not None and found.fence > before.fence and await two_copies()

        await until(led_again)
        await put("third")
        await shard.kill_leader()
        client = await shard.client()
        names = {one.group.task.task_id for one in await client.groups()}
        await client.close()
        assert names == {"first", "second", "third"}
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        shard.stop()


def saved(store: CheckpointStore, lineage: Lineage, step: int) -> Path:
    return store.save(
        lambda folder: (folder / "weights").touch(),
        step=step,
        weight_version=step,
        history=CheckpointHistory(),
        lineage=lineage.name,
        fence=lineage.began_fence,
    )


async def no_groups() -> int:
    return 0


async def test_trainers_continue_on_an_older_etcd(
    own_etcd: EtcdServer, coordinator: Coordinator, tmp_path: Path
) -> None:
    """A trainer takes a fence above the checkpoint's: what a former one writes later is set
    aside, as before the restore."""
    store = CheckpointStore(tmp_path / "checkpoints")

    async def elected(name: str) -> Lineage:
        lineage = Lineage(coordinator, trainer=name, location="h:/c", start_over="", ttl_s=5.0)
        await lineage.campaign(lambda: None)
        await lineage.check(store)
        await lineage.begin(next(store.newest_first(), None), no_groups)
        return lineage

    first = await elected("first")
    await first.saved(saved(store, first, 1), step=1, weight_version=1)
    await first.resign()
    own_etcd.save(tmp_path / "snapshot")
    await many_revisions(coordinator, 300)
    second = await elected("second")
    await second.saved(saved(store, second, 2), step=2, weight_version=2)
    await second.resign()
    await restore(own_etcd, tmp_path / "snapshot", coordinator)

    third = await elected("third")
    assert third.began_fence > second.began_fence
    await third.saved(saved(store, third, 3), step=3, weight_version=3)
    saved(store, second, 4)
    await third.resign()
    fourth = await elected("fourth")
    assert fourth.began_fence > third.began_fence
    assert next(store.newest_first()).step == 3
    await fourth.resign()


async def test_weight_versions_rise_above_those_in_service(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    """A worker has weights of after the snapshot: their version never names other weights."""
    worker = await coordinator.register(
        "decode", "worker", "h:1", metadata={"weight_version": "40"}, ttl_s=30.0
    )
    unready = await coordinator.register("prefill", "unready", "h:2", ttl_s=30.0)
    lineage = Lineage(coordinator, trainer="t", location="h:/c", start_over="", ttl_s=5.0)
    await lineage.campaign(lambda: None)
    await lineage.check(CheckpointStore(tmp_path / "checkpoints"))
    assert await lineage.begin(None, no_groups) == 40
    await lineage.resign()
    await worker.close()
    await unready.close()


async def test_deposed_leader_cannot_raise_its_fence(
    own_etcd: EtcdServer, coordinator: Coordinator, cluster: str
) -> None:
    """It slept, and another one leads; the next one stays above every fence that was taken."""
    first = await coordinator.campaign(ELECTION, "first")
    await first.raise_above(first.fence - 1)
    before = first.fence
    await first.raise_above(before + 1000)
    assert first.fence == before + 1001
    await own_etcd.end_leases(cluster, "first")
    second = await coordinator.campaign(ELECTION, "second")
    assert second.fence > first.fence
    with pytest.raises(Unavailable, match="no longer leads"):
        await first.raise_above(second.fence)
    await asyncio.gather(*(second.raise_above(second.fence + more) for more in (5, 50, 0)))
    assert second.fence == first.fence + 52
    await second.resign()
    await first.resign()
