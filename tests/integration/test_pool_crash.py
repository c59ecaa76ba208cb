"""kill -9 of a real pool under load, at random points: every acknowledged write is there and
intact.

FORGE_CRASH_ROUNDS sets how often (default 10); `make crash` does it 200 times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from forge.core.errors import FailedPrecondition, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.status import translated
from forge.v1 import common_pb2, pool_pb2
from services.pool.maintenance.archive.archive import archives_at
from services.pool.maintenance.archive.archive_restore import restore_archive
from services.pool.maintenance.backup import backup
from services.pool.maintenance.backup.restore import restore
from services.pool.maintenance.backup.scheduled_backups import backups_in
from services.pool.storage.tables import Table
from tests.support.pool.account import (
    TURNS,
    Ledger,
    audit,
    late_reward_of,
    put_of,
    requests_of,
    seal_of,
    train_of,
    trajectory_of,
    turn_of,
)
from tests.support.pool.process import PoolClient, PoolProcess
from tests.support.pool.store import records_of
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.service_process import ServiceProcess, start_service
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.faults

ROUNDS = int(os.environ.get("FORGE_CRASH_ROUNDS", "10"))
WRITERS = 4


def _begun(copied: Path, compacting: asyncio.Task[None]) -> bool:
    return copied.exists() or compacting.done()


async def write(client: PoolClient, ledger: Ledger, names: Iterator[str], fence: int) -> None:
    """Groups with a sealed trajectory each, trained on and rewarded late, noting what is
    acknowledged, until the pool dies."""
    with contextlib.suppress(Unavailable):
        async with translated():
            await fill(client, ledger, names, fence)


async def check_fence(client: PoolClient, fence: int) -> None:
    """Whoever led before the last acknowledged leader is refused."""
    with pytest.raises(FailedPrecondition, match=f"a leader with fence {fence} has written"):
        async with translated():
            await client.stub.PutGroups(put_of("t0", fence - 1))


async def fill(client: PoolClient, ledger: Ledger, names: Iterator[str], fence: int) -> None:
    for task_id in names:
        await client.stub.PutGroups(put_of(task_id, fence))
        ledger.groups.add(task_id)
        ledger.add()
        await finish(client, ledger, task_id, fence)


async def finish(client: PoolClient, ledger: Ledger, task_id: str, fence: int) -> None:
    """All that belongs to a group, whatever of it is there already."""
    trajectory_id = trajectory_of(task_id)
    await append(client, ledger, [turn_of(trajectory_id, i) for i in range(TURNS)])
    answer = await client.stub.SealTrajectory(seal_of(trajectory_id))
    ledger.sealed[trajectory_id] = answer.summary
    ledger.add()
    await client.stub.SetGroupStates(train_of(task_id, fence))
    ledger.trained.add(task_id)
    ledger.add()
    await client.stub.AppendRewards(late_reward_of(trajectory_id))
    ledger.rewarded.add(trajectory_id)
    ledger.add()


async def append(client: PoolClient, ledger: Ledger, turns: list[common_pb2.Turn]) -> None:
    async def requests() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
        for request in requests_of(turns):
            yield request

    async for answer in client.stub.AppendTurns(requests()):
        assert answer.status_code == 0, answer.error
        ledger.turns.add((turns[0].trajectory_id, answer.sequence))
        ledger.add()


@pytest_asyncio.fixture
async def pool(tmp_path: Path, etcd: EtcdServer, cluster: str) -> AsyncIterator[PoolProcess]:
    process = PoolProcess(tmp_path / "pool", etcd=etcd, cluster=cluster)
    yield process
    process.kill()


async def test_kill_9_loses_no_acknowledged_write(pool: PoolProcess, coordinator: Coordinator):
    """Killed repeatedly while four writers queue, append, seal, train and reward, the pool has
    every acknowledged record whole after each start, knows its leader, and accepts the rest
    again."""
    draw = random.Random(0)
    ledger = Ledger()
    numbers = itertools.count()
    for fence in range(1, ROUNDS + 1):
        # A small first map: some of the kills hit while it grows.
        pool.start("--store.map-bytes", str(1 << 20))
        client = await PoolClient.connect(pool, coordinator)
        # All of them after every kill would cost the square of the rounds; at the end it is all.
        await audit(client, ledger, ledger.sample(draw))
        if fence > 1:
            await check_fence(client, fence - 1)
        names = (f"t{number}" for number in numbers)
        writers = [asyncio.create_task(write(client, ledger, names, fence)) for _ in range(WRITERS)]
        await ledger.reach(ledger.count + draw.randrange(1, 60))
        # A random moment of the load, for the kill.
        await asyncio.sleep(draw.random() * 0.01)
        pool.kill()
        await asyncio.gather(*writers)
        await client.close()
    pool.start()
    client = await PoolClient.connect(pool, coordinator)
    await audit(client, ledger)
    await check_fence(client, ROUNDS)
    survived = str(ledger)
    for task_id in ledger.unfinished():
        await finish(client, ledger, task_id, ROUNDS)
    await audit(client, ledger)
    await client.close()
    assert ledger.count > ROUNDS
    assert ledger.trained == ledger.groups
    print(f"{ROUNDS} kills: {survived} acknowledged by then, none missing or changed")


async def compact(client: PoolClient) -> None:
    """Until it is done or the pool dies."""
    with contextlib.suppress(Unavailable):
        async with translated():
            async for _ in client.stub.CompactShard(pool_pb2.CompactShardRequest()):
                pass


async def test_kill_9_during_a_compaction_loses_no_acknowledged_write(
    pool: PoolProcess, coordinator: Coordinator
):
    """During the copy, the catch-up or the exchange: the file has everything, and no other is
    left."""
    draw = random.Random(1)
    ledger = Ledger()
    numbers = itertools.count()
    inodes = set()
    rounds = max(3, ROUNDS // 4)
    for _ in range(rounds):
        pool.start("--store.map-bytes", str(1 << 20))
        client = await PoolClient.connect(pool, coordinator)
        inodes.add((pool.data_dir / "data.mdb").stat().st_ino)
        await audit(client, ledger, ledger.sample(draw))
        names = (f"t{number}" for number in numbers)
        writers = [asyncio.create_task(write(client, ledger, names, 1)) for _ in range(WRITERS)]
        await ledger.reach(ledger.count + 1)
        compacting = asyncio.create_task(compact(client))
        # A random moment of the compaction, for the kill.
        if draw.random() < 0.7:
            copied = pool.data_dir / "compacted"
            await until(partial(_begun, copied, compacting))
            await asyncio.sleep(draw.random() * 0.5)
        else:
            await asyncio.sleep(draw.random())
        pool.kill()
        await asyncio.gather(compacting, *writers)
        await client.close()
    pool.start()
    client = await PoolClient.connect(pool, coordinator)
    await audit(client, ledger)
    await check_fence(client, 1)
    await client.close()
    assert {path.name for path in pool.data_dir.iterdir()} <= {"data.mdb", "lock.mdb", "replica"}
    assert not list(backup.check(pool.data_dir, lambda done, total: None))
    print(f"{rounds} kills while it was compacted, {len(inodes)} files; {ledger}")


def quiet(done: int, total: int) -> None:
    """No progress."""


def count_entries(place: Path) -> int:
    """The number of files and folders, which may be renamed meanwhile."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(place))


def has_written(place: Path, files: int, tool: ServiceProcess) -> bool:
    return count_entries(place) > files or tool.poll() is not None


async def end(tool: ServiceProcess) -> None:
    """Waits for success."""
    assert await asyncio.to_thread(tool.wait, 60.0) == 0


async def test_kill_9_of_archive_and_backup_loses_and_doubles_nothing(
    pool: PoolProcess, coordinator: Coordinator, tmp_path: Path
) -> None:
    """Both are killed again and again beside a shard under load, and then run to their end: each
    trained group is in the archive once, as the shard has it, and every backup restores."""
    draw = random.Random(2)
    ledger = Ledger()
    folder, archived = tmp_path / "backups", tmp_path / "archive"
    tools = {
        folder: ("back-up-scheduled", str(folder), "--full-every-s=3600", "--keep=9"),
        archived: ("archive", f"--to=file://{archived}", "--older-than-s=0"),
    }

    def start(place: Path) -> ServiceProcess:
        command, *options = tools[place]
        words = (command, str(pool.data_dir), *options)
        return start_service("services.pool.maintenance", *words, stderr=subprocess.PIPE)

    pool.start()
    client = await PoolClient.connect(pool, coordinator)
    names = (f"t{number}" for number in itertools.count())
    writer = asyncio.create_task(write(client, ledger, names, 1))
    killed = 0
    for round_ in range(max(4, ROUNDS // 4)):
        await ledger.reach(ledger.count + 8)
        place = (folder, archived)[round_ % 2]
        files = count_entries(place)
        tool = start(place)
        # In the middle of its writes, or a moment later.
        await until(partial(has_written, place, files, tool))
        await asyncio.sleep(draw.random() * 0.02 * (round_ % 3))
        tool.kill()
        killed += tool.wait(60.0) == -9
    await end(start(folder))
    pool.kill()
    await writer
    await client.close()
    for place in tools:
        await end(start(place))

    shard = records_of(pool.data_dir)
    backups = backups_in(folder)
    assert len(backups) >= 2
    for number, one in enumerate((backups[0], backups[-1])):
        assert restore(one.directory, tmp_path / f"restored-{number}", quiet) == []
    assert records_of(tmp_path / f"restored-{number}") == shard
    assert not list(folder.glob("*.unfinished"))

    (one_store,) = archives_at(f"file://{archived}")
    newest = {task: entry.segment_id for entry in one_store.entries() for task in entry.groups}
    assert newest.keys() >= ledger.trained
    for entry in one_store.entries():
        tasks = [group.task_id for group in one_store.groups(entry)]
        assert len(tasks) == len(set(tasks)) and set(tasks) == entry.groups.keys()
    assert (
        restore_archive(f"file://{archived}", tmp_path / "copy", shard="s0", progress=quiet) == []
    )
    copy = records_of(tmp_path / "copy")
    for table in (Table.GROUPS, Table.TURNS, Table.REWARDS):
        expected = {key: value for key, value in shard[table] if task_of(key) in newest}
        assert dict(copy[table]) == expected, table
    print(f"{killed} kills of an archive or a backup; {ledger}")


def task_of(key: bytes) -> str:
    """The task of a record of a group, trajectory, turn or reward."""
    return key.partition(b":")[0].decode()
