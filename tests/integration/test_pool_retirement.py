"""Pool shards that an operator retires: every group moves, and later leaders begin without them.
Real processes."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path

import pytest

from forge.client.stored.pool import PoolReader
from forge.core.errors import FailedPrecondition, NotFound
from forge.core.placement.sharding import choose_shard
from forge.runtime.rpc.remote import Remote
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from forge.v1.pool_pb2_grpc import PoolServiceStub
from services.gateway.pool_client import Pool
from services.scheduler.term_record import TermRecord
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import (
    START_S,
    SchedulerCluster,
    assert_counts_balance,
    make_task,
)
from tests.support.scheduler.shards import names_on, start, train

RETIRING = scheduler_pb2.RETIREMENT_STATE_RETIRING
RETIRED = scheduler_pb2.RETIREMENT_STATE_RETIRED


async def retire(
    forge: SchedulerCluster, shard: str, *, cancel: bool = False
) -> scheduler_pb2.RetireShardResponse:
    request = scheduler_pb2.RetireShardRequest(pool_shard=shard, cancel=cancel)
    answer: scheduler_pb2.RetireShardResponse = await forge.ask("RetireShard", request)
    return answer


async def until_retired(forge: SchedulerCluster, shard: str) -> None:
    async def is_retired() -> bool:
        return (await retire(forge, shard)).state == RETIRED

    await until(is_retired)


async def contents(forge: SchedulerCluster) -> dict[str, bytes]:
    """Every trajectory of every shard, by id; once each."""
    reader = PoolReader(forge.coordinator, forge.channels)
    found: dict[str, bytes] = {}
    async for page in reader.query(pool_pb2.TrajectoryFilter()):
        ids = [summary.trajectory_id for summary in page.trajectories]
        async for trajectory in reader.fetch(page.shard, ids, on_damage=pytest.fail):
            assert trajectory.trajectory_id not in found
            found[trajectory.trajectory_id] = trajectory.SerializeToString(deterministic=True)
    return found


async def test_retired_shard_moves_every_group_and_is_not_awaited(
    forge: SchedulerCluster,
) -> None:
    """Trained, complete, running, queued and evaluation groups: all are on the other shard, each
    with its trajectories. A standby that copied both shards before has the same counts when it
    leads, and the old store is refused."""
    first = await start(forge, "s1", queue={"window": "32", "concurrency": "32"})
    both = ("s0", "s1")
    tasks = [
        make_task(name)
        for shard in both
        for name in names_on(shard, 6, prefix="train", shards=both)
    ]
    evaluations = [
        make_task(name, evaluation=True, tag="exam")
        for name in names_on("s1", 3, prefix="eval", shards=both)
    ]
    await forge.submit([*tasks, *evaluations])
    await forge.complete(3)
    assert len(await train(forge, 1, groups=4)) == 4
    await forge.complete(2)
    running = await forge.lease(3)
    shards = {g.group.task.task_id: g.group.pool_shard for g in await forge.groups()}
    on_s1 = [lease for lease in running if shards[lease.task.task_id] == "s1"]
    assert on_s1, "some run on the shard"
    before, exam = await forge.status(), await forge.groups("exam")
    stored = await contents(forge)

    standby = forge.start_scheduler(
        queue={"window": "32", "concurrency": "32"}, shard_wait_s="3600"
    )
    await standby.until_logged("pool_shard_scanned", times=2)
    begun = await retire(forge, "s1")
    assert begun.state == RETIRING and begun.progress.groups_left
    fresh = names_on("s1", 1, prefix="fresh", shards=both)
    assert await forge.submit([make_task(fresh[0])]) == 1

    async def only_busy_ones_are_left() -> bool:
        (progress,) = (await forge.status()).retirements
        return progress.groups_left == progress.groups_busy == len(on_s1)

    await until(only_busy_ones_are_left)
    assert [r.pool_shard for r in (await forge.status()).retirements] == ["s1"]
    assert_counts_balance(await forge.status())
    for lease in running:
        await forge.seal(lease)
    await forge.finish(running)
    await until_retired(forge, "s1")
    assert await contents(forge) == stored | {
        key: value for key, value in (await contents(forge)).items() if key not in stored
    }
    assert {g.group.pool_shard for g in await forge.groups()} == {"s0"}
    after = await forge.status()
    assert_counts_balance(after)
    assert (after.accepted, after.trained) == (before.accepted + 1, before.trained)
    assert rewards_of(await forge.groups("exam")) == rewards_of(exam)

    await forge.kill(forge.pools["s1"])
    await forge.kill(first)
    status = await forge.status()
    assert (status.accepted, status.trained) == (after.accepted, after.trained)
    assert not status.shards_away
    assert rewards_of(await forge.groups("exam")) == rewards_of(exam)
    assert await forge.submit([*tasks, *evaluations]) == 0, "no task is forgotten"
    for step in range(2, 100):
        if not (await forge.status()).pending:
            break
        await train(forge, step, groups=1)
    status = await forge.status()
    assert status.trained == status.accepted == 13

    forge.start_pool("s1")
    code, stderr = await asyncio.to_thread(forge.pools["s1"].wait)
    assert code == 2 and "was retired on" in stderr and len(stderr.strip().splitlines()) == 1


def rewards_of(
    groups: Sequence[scheduler_pb2.BatchGroup],
) -> dict[str, list[tuple[str, list[float]]]]:
    return {
        group.group.task.task_id: sorted(
            (each.trajectory_id, [reward.value for reward in each.rewards])
            for each in group.trajectories
        )
        for group in groups
    }


@pytest.mark.faults
async def test_a_retirement_survives_kills_of_leader_source_and_target(
    forge: SchedulerCluster,
) -> None:
    """Each is killed in the middle; no group is lost, and none is on two shards."""
    await start(forge, "s1", "s2")
    shards = ("s0", "s1", "s2")
    tasks = [make_task(name) for name in names_on("s1", 300, prefix="task", shards=shards)]
    await forge.submit(tasks)
    for step in (1, 2, 3):
        await train(forge, step)
    stored = await contents(forge)
    left = (await retire(forge, "s1")).progress.groups_left
    assert left == 300

    async def some_moved() -> bool:
        return 0 < (await retire(forge, "s1")).progress.groups_left < left

    await until(some_moved)
    await forge.kill(forge.schedulers[0])
    forge.start_scheduler()
    for victim in ("s1", "s0", "s2"):
        await forge.kill(forge.pools[victim])
        forge.start_pool(victim)
    await until_retired(forge, "s1")
    status = await forge.status()
    assert_counts_balance(status)
    assert (status.accepted, status.trained) == (300, 6)
    assert await contents(forge) == stored
    stats = [
        await forge.ask_pool(s, "GetPoolStats", pool_pb2.GetPoolStatsRequest()) for s in shards
    ]
    assert [each.groups for each in stats][1] == 0
    assert sum(each.groups for each in stats) == 300
    await forge.kill(forge.schedulers[1])
    await forge.kill(forge.pools["s1"])
    forge.start_scheduler(shard_wait_s="3600")
    status = await forge.status()
    assert (status.accepted, status.trained, status.pending) == (300, 6, 294)
    assert await forge.submit(tasks) == 0


async def test_commits_and_leases_do_not_wait_for_a_move(forge: SchedulerCluster) -> None:
    """The target is frozen in the middle of a copy; training on the other shard continues."""
    await start(forge, "s1", "s2", queue={"window": "16"})
    shards = ("s0", "s1", "s2")
    moved = names_on("s1", 4, prefix="task", shards=shards)
    # Those of s1 would go to s2.
    moved = [name for name in moved if choose_shard(name, ("s0", "s2")) == "s2"]
    here = names_on("s0", 6, prefix="task", shards=shards)
    await forge.submit([make_task(name) for name in (*moved, *here)])
    assert moved
    forge.pools["s2"].freeze()
    await retire(forge, "s1")
    assert set(await train(forge, 1)) <= set(here)
    assert (await retire(forge, "s1")).progress.groups_left == len(moved)
    forge.pools["s2"].thaw()
    await until_retired(forge, "s1")


async def test_groups_of_a_cancelled_move_are_leased_where_they_end(
    forge: SchedulerCluster,
) -> None:
    """The retirement is cancelled while the target is frozen in the middle of a copy. A rollout
    leased at the source would be lost with the mark, and sampled again."""
    await start(forge, "s1", "s2", queue={"window": "16"})
    names = names_on("s1", 4, prefix="task", shards=("s0", "s1", "s2"))
    names = [name for name in names if choose_shard(name, ("s0", "s2")) == "s2"]
    forge.pools["s2"].freeze()
    await forge.submit([make_task(name) for name in names])
    await retire(forge, "s1")

    async def has_begun() -> bool:
        return (await TermRecord.read(forge.coordinator)).move is not None

    await until(has_begun)
    await retire(forge, "s1", cancel=True)
    leases = await forge.lease(len(names), wait_s=1.0)
    forge.pools["s2"].thaw()

    async def has_ended() -> bool:
        return {group.group.pool_shard for group in await forge.groups()} == {"s2"}

    await until(has_ended)
    while len(leases) < len(names):
        leases += await forge.lease(len(names))
    for lease in leases:
        await forge.seal(lease)
    await forge.finish(leases)
    assert {lease.trajectory_id.partition(":")[0] for lease in leases} == set(names)
    status = await forge.status()
    assert (status.pending, status.running_rollouts) == (len(names), 0)
    assert status.complete_in_window == len(names)


async def test_a_shard_that_cannot_retire_is_refused(forge: SchedulerCluster) -> None:
    """An unknown, an only and an unreachable one; after a cancel it gets groups again."""
    await start(forge)
    with pytest.raises(NotFound, match=r"s9.*there are: s0"):
        await retire(forge, "s9")
    with pytest.raises(FailedPrecondition, match="only one that takes groups"):
        await retire(forge, "s0")
    forge.start_pool("s1")

    async def is_admitted() -> bool:
        return len(forge.schedulers[0].logged("pool_shard_registered")) == 2

    await until(is_admitted)
    names = names_on("s1", 3, prefix="task", shards=("s0", "s1"))
    await forge.submit([make_task(names[0])])
    (lease,) = await forge.lease(1)
    assert (await retire(forge, "s1")).state == RETIRING
    answer = await retire(forge, "s1", cancel=True)
    assert answer.state == scheduler_pb2.RETIREMENT_STATE_CANCELLED
    await forge.submit([make_task(names[1])])
    assert {g.group.pool_shard for g in await forge.groups()} == {"s1"}
    await forge.seal(lease)
    await forge.finish([lease])
    await forge.kill(forge.pools["s1"])
    with pytest.raises(FailedPrecondition, match="declare-lost s1"):
        await retire(forge, "s1")


async def test_retire_command_shows_its_progress_to_the_end(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """`forge pool retire` ends when the shard is retired, and again at once."""
    await start(forge, "s1")
    names = names_on("s1", 5, prefix="task", shards=("s0", "s1"))
    await forge.submit([make_task(name) for name in names])
    argv = [sys.executable, "-m", "forge.cli.main", "pool", "retire", "s1"]
    argv += ["--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(tmp_path / "key")]
    for _ in range(2):
        command = await asyncio.create_subprocess_exec(*argv, stdout=PIPE, stderr=PIPE)
        said, wrong = await command.communicate()
        assert command.returncode == 0, wrong.decode()
        assert "s1 is retired: no group is left on it" in said.decode()
    groups = await forge.groups()
    assert {g.group.pool_shard for g in groups} == {"s0"}
    assert {g.group.state for g in groups} == {common_pb2.GROUP_STATE_PENDING}


async def test_a_replicated_shard_retires_too(forge: SchedulerCluster) -> None:
    """Its groups leave by replicated commits, and its replica is refused at its next start."""
    alone = ("--replication.durability", "replicated", "--replication.min-copies", "1")
    # An empty shard waits the lease of a replica with data.
    forge.start_pool("s1", *alone, "--lease-ttl-s", "5")
    await start(forge)
    pools = forge.coordinator.discover("pool")
    await pools.wait(count=2, timeout_s=START_S)
    names = names_on("s1", 3, prefix="task", shards=("s0", "s1"))

    async def are_on_s1() -> bool:
        return len(forge.schedulers[0].logged("pool_shard_registered")) == 2

    await until(are_on_s1)
    await forge.submit([make_task(name) for name in names])
    assert {g.group.pool_shard for g in await forge.groups()} == {"s1"}
    await retire(forge, "s1")
    await until_retired(forge, "s1")
    assert {g.group.pool_shard for g in await forge.groups()} == {"s0"}
    await forge.kill(forge.pools["s1"])
    forge.start_pool("s1", *alone)
    code, stderr = await asyncio.to_thread(forge.pools["s1"].wait)
    assert code == 2 and "was retired on" in stderr


async def test_gateways_reach_a_moved_group(forge: SchedulerCluster) -> None:
    """The session of a moved group can be closed again and gets a late reward."""
    await start(forge, "s1")
    await forge.submit(
        [make_task(name) for name in names_on("s1", 1, prefix="late", shards=("s0", "s1"))]
    )
    leases = await forge.lease(4)
    for lease in leases:
        await forge.seal(lease)
    await forge.finish(leases)
    await retire(forge, "s1")
    await until_retired(forge, "s1")
    remote = Remote(forge.coordinator, forge.channels, kind="pool", stub=PoolServiceStub)

    async def gone(shard: str) -> str:
        return ""

    pool = Pool(remote, timeout_s=START_S, wait_s=START_S, gone=gone)
    task_id = lease.task.task_id
    claims = Claims(
        subject="",
        scopes=frozenset(),
        trajectory_id=lease.trajectory_id,
        task_id=task_id,
        domain=lease.task.domain,
        pool_shard="s1",
    )
    before = await pool.fetch(claims)
    assert before is not None and len(before.rewards) == 1
    late = common_pb2.RewardEvent(event_id="late", name="late", kind=common_pb2.REWARD_KIND_PROCESS)
    await pool.annotate(claims, [late])
    await pool.seal(
        claims,
        turns=len(before.turns),
        rewards=before.rewards,
        abandon_reason="",
        closing_agent_s=None,
    )
    after = await pool.fetch(claims)
    assert after is not None
    assert sorted(reward.event_id for reward in after.rewards) == ["late", "outcome"]
    assert after.turns == before.turns
