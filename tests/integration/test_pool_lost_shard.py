"""Pool shards that an operator declares lost: no leader waits for them. Real processes."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import pytest

from forge.core.errors import FailedPrecondition, NotFound
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler.term_record import TermRecord
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import (
    START_S,
    SchedulerCluster,
    assert_counts_balance,
    ids_of,
    make_task,
)
from tests.support.scheduler.shards import names_on, start, train

pytestmark = pytest.mark.faults

BOTH = ("s0", "s1")


async def declare_lost(
    forge: SchedulerCluster, shard: str
) -> scheduler_pb2.DeclareShardLostResponse:
    request = scheduler_pb2.DeclareShardLostRequest(pool_shard=shard)
    answer: scheduler_pb2.DeclareShardLostResponse = await forge.ask("DeclareShardLost", request)
    return answer


async def test_lost_shard_is_declared_once_for_every_later_leader(
    forge: SchedulerCluster,
) -> None:
    """Pending groups are tombstoned with the reason, settled ones stay counted, and the store is
    refused when it returns with its data."""
    first = await start(forge, "s1", queue={"window": "16"}, held_settled_groups="2")
    there, here = (names_on(shard, 6, prefix="t", shards=BOTH) for shard in BOTH)
    tasks = [make_task(name) for pair in zip(there, here, strict=True) for name in pair]
    await forge.submit(tasks)
    trained: list[str] = []
    for step in (1, 2, 3):
        trained += await train(forge, step)
    claims = await forge.lease(1)
    pending = len(set(here) - set(trained))
    assert pending and set(here) & set(trained)
    with pytest.raises(FailedPrecondition, match="is in discovery"):
        await declare_lost(forge, "s1")
    with pytest.raises(NotFound, match="there are: s0, s1"):
        await declare_lost(forge, "s9")
    await forge.kill(forge.pools["s1"])
    answer = await declare_lost(forge, "s1")
    assert (answer.tombstoned, answer.settled) == (pending, len(set(here) & set(trained)))
    status = await forge.status()
    assert_counts_balance(status)
    assert (status.accepted, status.trained, status.tombstoned) == (12, 6, pending)
    reasons = {
        g.group.reason
        for g in await forge.groups()
        if g.group.state == common_pb2.GROUP_STATE_TOMBSTONED
    }
    assert reasons == {"shard_lost: pool shard s1 was declared lost"}
    lost_claims = {c.lease_id for c in claims if c.task.task_id in here}
    assert set(await forge.renew(claims)) == lost_claims
    assert await forge.submit([make_task("another")]) == 1, "nothing is awaited"
    again = await declare_lost(forge, "s1")
    assert (again.tombstoned, again.settled) == (0, 0)

    await forge.kill(first)
    forge.start_scheduler(queue={"window": "16"}, shard_wait_s="3600")
    later = await forge.status()
    assert_counts_balance(later)
    assert (later.accepted, later.trained, later.tombstoned) == (13, 6, pending)
    pending_tasks = [t for t in tasks if t.task_id in set(here) - set(trained)]
    assert await forge.submit(pending_tasks) == 0

    forge.start_pool("s1")
    code, stderr = await asyncio.to_thread(forge.pools["s1"].wait)
    assert code == 2 and "was declared lost on" in stderr and len(stderr.splitlines()) == 1


async def test_later_leader_tombstones_groups_whose_trajectories_are_lost(
    forge: SchedulerCluster,
) -> None:
    """Once a trainer rewinds: the leader that rebuilt them from their records on another shard
    knows no trajectory of them, and no trainer gets them empty."""
    first = await start(forge, "s1")
    there, here = (names_on(shard, 2, prefix="t", shards=BOTH) for shard in BOTH)
    await forge.submit([make_task(name) for name in (*there, *here)])
    assert {*await train(forge, 1, groups=4)} == {*there, *here}
    await forge.kill(forge.pools["s1"])
    answer = await declare_lost(forge, "s1")
    assert (answer.tombstoned, answer.settled) == (0, len(here))
    await forge.kill(first)
    forge.start_scheduler()
    assert (await forge.ask("Rewind", scheduler_pb2.RewindRequest(step=0))).groups == 4
    while not (batch := await forge.take(groups=4)).batch_id:
        pass
    assert {*ids_of(batch)} == {*there}
    await forge.commit(batch, 1)
    status = await forge.status()
    assert_counts_balance(status)
    assert (status.trained, status.tombstoned, status.pending) == (2, 2, 0)
    reasons = {g.group.reason for g in await forge.groups() if g.group.task.task_id in here}
    assert reasons == {"pool shard s0 has 0 of 1 trajectories"}


async def test_waiting_leader_begins_once_a_shard_is_declared_lost(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """By the command, which asks for the shard's name; that name is free for a new store."""
    first = await start(forge, "s1")
    names = names_on("s1", 3, prefix="task", shards=BOTH)
    await forge.submit([make_task(name) for name in names])
    await forge.kill(first)
    await forge.kill(forge.pools["s1"])
    record = await TermRecord.read(forge.coordinator)
    await replace(record, head=None).write(forge.coordinator)
    forge.start_scheduler()
    schedulers = forge.coordinator.discover("scheduler")
    while not any(i.metadata.get("awaits_shards") == "s1" for i in schedulers.instances):
        await schedulers.changed()

    argv = [sys.executable, "-m", "forge.cli.main", "pool", "declare-lost", "s1"]
    argv += ["--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(tmp_path / "key")]
    for typed, code in (("no", 1), ("s1", 0)):
        command = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        said, wrong = await command.communicate(typed.encode() + b"\n")
        assert command.returncode == code, wrong.decode()
    assert "s1 is declared lost" in said.decode()
    status = await forge.status()
    assert (status.accepted, list(status.shards_away)) == (0, [])
    assert await forge.submit([make_task(name) for name in names]) == 3

    (tmp_path / "pool-s1" / "data").rename(tmp_path / "lost")
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)

    second = forge.schedulers[1]
    await until(lambda: "s1" in [x["pool_shard"] for x in second.logged("pool_shard_registered")])
    await until(lambda: len(second.logged("pool_shard_registered")) == 2)
    fresh = names_on("s1", 1, prefix="fresh", shards=BOTH)
    await forge.submit([make_task(fresh[0])])
    assert {g.group.task.task_id for g in await forge.groups() if g.group.pool_shard == "s1"} == {
        fresh[0]
    }
