"""`forge pool erase` against both replicas of a shard and against a backup: no byte stays."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from etcd3aio.kv import KVService, prefix_range_end

from forge.client.stored.rollout_tables import note_tables
from forge.runtime.coordination import Coordinator
from forge.runtime.security.tokens import Keyring
from forge.v1 import pool_pb2
from services.pool.erasure_ledger import ErasureLedger, LedgerEntry
from tests.support.pool.process import PoolClient, PoolProcess
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.shard import ReplicatedShard
from tests.support.runtime.command import run_command
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

MARKER = "marker-of-alice"


@pytest_asyncio.fixture
async def shard(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[ReplicatedShard]:
    """A replicated shard that also serves with one replica."""
    Keyring.generate(tmp_path / "key")
    made = ReplicatedShard(
        tmp_path,
        etcd=etcd,
        coordinator=coordinator,
        cluster=cluster,
        shard="s0",
        key_file=tmp_path / "key",
        settings=("--replication.min-copies", "1", "--retention.mode", "keep"),
    )
    made.put_before_start(make_group("first"))
    made.start()
    keeper = asyncio.create_task(made.keep_running())
    yield made
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    made.stop()


async def fill(client: PoolClient) -> None:
    """Groups of two users; the texts of the first one have the marker."""
    for index, (user, text) in enumerate((("alice", MARKER), ("bob", "text-of-bob")), start=1):
        group = make_group(f"of-{user}", index, payload_json=f'{{"prompt": "{text}"}}')
        group.task.user, group.task.tag = user, f"tag-{user}"
        await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=[group], fence=1))
        sizes = (10, 3000, 300_000)
        turns = [
            make_turn(f"of-{user}:0:0", number, parent=-1, messages_json=text * (size // 10))
            for number, size in enumerate(sizes)
        ]
        assert all(not answer.status_code for answer in await client.append(turns))
        await client.seal(f"of-{user}:0:0", len(turns), [make_reward()])


async def forge_pool(*words: str) -> tuple[int, str]:
    """Exit code and output of `forge pool <words>`."""
    ended = await run_command("pool", *words)
    return ended.returncode, ended.stdout + ended.stderr


def files_with(marker: str, directory: Path) -> list[str]:
    """Files below a directory that contain the marker, as raw bytes. A compaction may remove files
    and folders meanwhile."""
    found = []
    for folder, _, names in os.walk(directory):  # passes over a folder that is gone
        for name in names:
            with suppress(FileNotFoundError):
                if marker.encode() in (Path(folder) / name).read_bytes():
                    found.append(name)
    return found


async def test_erasure_reaches_files_of_both_replicas_and_backups(
    shard: ReplicatedShard,
    etcd: EtcdServer,
    cluster: str,
    coordinator: Coordinator,
    tmp_path: Path,
) -> None:
    """The absent replica still has the prompt when the command ends, which says so; it erases on
    its return. A repeated erasure finds nothing. Late turns are refused. Noted
    trackers are named."""

    async def two_copies() -> bool:
        return (await shard.leader())[1].metadata.get("copies") == "2"

    await until(two_copies)
    at = ("--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(tmp_path / "key"))
    leader, _ = await shard.leader()
    (follower,) = [process for process in shard.processes if process is not leader]
    client = await shard.client()
    await fill(client)
    backup = tmp_path / "backup"
    code, output = await forge_pool("backup", str(leader.data_dir), str(backup))
    assert code == 0, output
    for directory in (leader.data_dir, follower.data_dir, backup):
        assert files_with(MARKER, directory) == ["data.mdb"]

    await shard.kill(follower)
    code, output = await forge_pool("erase", "--user", "alice", *at)
    assert code == 1, output
    assert "s0: 1 groups, 1 trajectories, 3 turns, 1 rewards erased" in output
    assert f"{leader.data_dir}: purged" in output and "the other replica: pending" in output
    assert files_with(MARKER, leader.data_dir) == []
    assert files_with(MARKER, follower.data_dir) == ["data.mdb"]

    shard.start()
    await until(lambda: not files_with(MARKER, follower.data_dir))
    await until(two_copies)
    assert "not erased" not in output
    places = ["project a of Trackio", "project b of Weights & Biases"]
    await asyncio.gather(*(note_tables(coordinator, [place]) for place in reversed(places)))
    code, output = await forge_pool("erase", "--task", "of-alice", *at)
    assert code == 0, output
    said = [
        f"not erased: the tables of rollouts in {place}; delete its runs there" for place in places
    ]
    assert output.splitlines()[-2:] == said
    assert "s0: 0 groups, 0 trajectories, 0 turns, 0 rewards erased" in output
    assert output.count(": purged") == 2
    await assert_refused(client)
    assert files_with(MARKER, leader.data_dir) == files_with(MARKER, follower.data_dir) == []
    assert files_with("text-of-bob", leader.data_dir) == ["data.mdb"]
    assert [one.trajectory_id for one in await client.fetch("of-bob:0:0")] == ["of-bob:0:0"]
    await client.close()

    code, output = await forge_pool("erase", "--tag", "tag-alice", "--backup", str(backup))
    assert code == 0, output
    assert files_with(MARKER, backup) == []
    code, output = await forge_pool("check", str(leader.data_dir))
    assert code == 0, output


async def test_elected_replica_applies_missed_erasures_before_it_serves(
    shard: ReplicatedShard, coordinator: Coordinator
) -> None:
    """The erasure came while both replicas were away; both files lose its bytes."""

    async def two_copies() -> bool:
        return (await shard.leader())[1].metadata.get("copies") == "2"

    await until(two_copies)
    client = await shard.client()
    await fill(client)
    await client.close()
    await shard.kill(*shard.processes)
    request = pool_pb2.EraseTrajectoriesRequest(user="alice", erasure_id="missed")
    await ErasureLedger(coordinator).record(LedgerEntry.of(request, now_unix_s=1.0))

    shard.start()
    client = await shard.client()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.fetch("of-alice:0:0")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert [one.trajectory_id for one in await client.fetch("of-bob:0:0")] == ["of-bob:0:0"]
    await client.close()
    for process in shard.processes:
        await until(lambda: not files_with(MARKER, process.data_dir))  # noqa: B023


async def assert_refused(client: PoolClient) -> None:
    """A turn of a gateway that still has the session in memory."""
    (answer,) = await client.append([make_turn("of-alice:0:0", 3, messages_json=MARKER)])
    assert "an operator erased" in answer.error


async def lose_ledger(etcd: EtcdServer, cluster: str) -> int:
    """As with an etcd that starts empty; the number of entries."""
    prefix = f"/forge/{cluster}/pool/erasures/"
    async with grpc.aio.insecure_channel(etcd.endpoint) as channel:
        keys = KVService(channel)
        found = await keys.get(prefix, range_end=prefix_range_end(prefix), timeout=30)
        await keys.delete(prefix, range_end=prefix_range_end(prefix), timeout=30)
        return len(found.kvs)


async def test_restored_and_absent_shards_repeat_erasures(
    etcd: EtcdServer, cluster: str, coordinator: Coordinator, tmp_path: Path
) -> None:
    """Before they serve. An absent shard had no part in the command; the backup is older than it.
    Later tasks of the user stay. A ledger that etcd loses is written again by the stores."""
    Keyring.generate(tmp_path / "key")
    at = ("--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(tmp_path / "key"))
    s0, s1 = (
        PoolProcess(
            tmp_path / name, etcd=etcd, cluster=cluster, shard=name, key_file=tmp_path / "key"
        )
        for name in ("s0", "s1")
    )

    async def started(pool: PoolProcess) -> PoolClient:
        pool.start("--retention.mode", "keep")
        return await PoolClient.connect(pool, coordinator)

    async def ended(pool: PoolProcess) -> None:
        ending = pool.id_ending
        pool.kill()
        await etcd.end_leases(cluster, ending)

    async def restored(pool: PoolProcess) -> PoolClient:
        await ended(pool)
        shutil.rmtree(pool.data_dir)
        code, output = await forge_pool("restore", str(tmp_path / "backup"), str(pool.data_dir))
        assert code == 0, output
        assert files_with(MARKER, pool.data_dir)
        return await started(pool)

    async def lacks_alice(pool: PoolProcess, client: PoolClient) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.fetch("of-alice:0:0")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert [one.trajectory_id for one in await client.fetch("of-bob:0:0")] == ["of-bob:0:0"]
        await until(lambda: not files_with(MARKER, pool.data_dir))

    try:
        for pool in (s0, s1):
            await fill(await started(pool))
        code, output = await forge_pool("backup", str(s0.data_dir), str(tmp_path / "backup"))
        assert code == 0, output
        await ended(s1)
        code, output = await forge_pool("erase", "--user", "alice", *at)
        assert code == 0, output
        assert "s1" not in output
        later = make_group("later", 9)
        later.task.user = "alice"
        await lacks_alice(s1, await started(s1))
        await lacks_alice(s0, await restored(s0))
        assert await lose_ledger(etcd, cluster) == 1
        await ended(s1)
        client = await started(s1)
        assert await lose_ledger(etcd, cluster) == 1, "the store has written it again"
        await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=[later], fence=2))
        await ended(s1)
        client = await started(s1)
        (kept,) = [one for one in await client.groups() if one.group.task.task_id == "later"]
        assert kept.group.task.user == "alice"
        await lacks_alice(s0, await restored(s0))
    finally:
        for pool in (s0, s1):
            pool.kill()
