"""Bytes flipped in the files of a replicated shard that is served: real processes, a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from forge.client.retry import retried
from forge.core.errors import DataLoss
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.status import translated
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, pool_pb2
from services.pool.maintenance.backup import backup
from tests.support.pool.damage import flip_served
from tests.support.pool.process import CALL_S, PoolClient, PoolProcess
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.shard import ReplicatedShard
from tests.support.runtime.command import run_command
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import LIMIT_S, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

TRAJECTORY = "t:0:0"
SAID = "said once and stored once"

MakeShard = Callable[..., ReplicatedShard]


@pytest_asyncio.fixture
async def shard(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[MakeShard]:
    """A shard with the settings given, both of its processes started."""
    made: list[ReplicatedShard] = []
    Keyring.generate(tmp_path / "key")

    def make(*settings: str) -> ReplicatedShard:
        made.append(
            ReplicatedShard(
                tmp_path,
                etcd=etcd,
                coordinator=coordinator,
                cluster=cluster,
                shard="s0",
                key_file=tmp_path / "key",
                settings=settings,
            )
        )
        made[-1].put_before_start(make_group("t"))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.stop()


async def filled(replicas: ReplicatedShard) -> tuple[PoolClient, PoolProcess, PoolProcess]:
    """Its leader's client, leader and follower, once both have a sealed trajectory."""
    client = await replicas.client()
    request = pool_pb2.PutGroupsRequest(groups=[make_group("t")], fence=1)

    @translated()
    async def put() -> None:
        await client.stub.PutGroups(request, timeout=CALL_S)

    await retried(put, retry_for_s=LIMIT_S)
    said = make_turn(TRAJECTORY, messages_json=SAID)
    assert not any(one.error for one in await client.append([said, make_turn(TRAJECTORY, 1)]))
    await client.seal(TRAJECTORY, 2, [make_reward()])
    leader, _ = await replicas.leader()
    (follower,) = (each for each in replicas.processes if each is not leader)
    return client, leader, follower


async def fetched(client: PoolClient) -> common_pb2.Trajectory:
    async with translated():
        (trajectory,) = await client.fetch(TRAJECTORY)
    return trajectory


async def logged(process: PoolProcess, event: str) -> None:
    await until(lambda: event in process.log_path.read_text())


def damage_of(process: PoolProcess) -> list[str]:
    return [str(one) for one in backup.check(process.data_dir, lambda done, of: None)]


async def test_leader_reads_a_damaged_record_from_its_follower(shard):
    """The reader gets the trajectory as it was sealed, and the leader's file is whole again."""
    replicas = shard("--replication.verify-every-s", "0")
    client, leader, follower = await filled(replicas)
    before = await fetched(client)
    flip_served(leader.data_dir, SAID.encode())
    assert damage_of(leader)
    assert await fetched(client) == before
    assert "record_repaired" in leader.log_path.read_text()
    assert damage_of(leader) == damage_of(follower) == []
    await client.close()


async def test_record_damaged_on_both_replicas_is_named_to_its_reader(shard):
    """It stays as it is; other records are readable and counted."""
    replicas = shard("--replication.verify-every-s", "0")
    client, leader, follower = await filled(replicas)
    for process in (leader, follower):
        flip_served(process.data_dir, SAID.encode())
    for _ in range(2):
        with pytest.raises(DataLoss, match=r"record b't:.* in turns does not match"):
            await fetched(client)
    assert leader.log_path.read_text().count("record_lost") == 1
    assert "trajectories t:0:0" in leader.log_path.read_text()
    assert len(damage_of(leader)) == len(damage_of(follower)) > 0
    (summary,) = (await client.groups())[0].trajectories
    assert summary.turns == 2
    for process in (leader, follower):
        flip_served(process.data_dir, b"exact_answer")
    page = await client.stub.QueryTrajectories(pool_pb2.QueryTrajectoriesRequest(), timeout=CALL_S)
    assert list(page.damaged_trajectory_ids) == [TRAJECTORY]
    assert not page.trajectories
    await client.close()


async def test_repair_pass_of_a_follower_uses_its_leader(shard):
    """A follower serves no reads, so it verifies its records itself."""
    replicas = shard("--replication.verify-every-s", "0.2")
    client, _, follower = await filled(replicas)
    flip_served(follower.data_dir, SAID.encode())
    await logged(follower, "record_repaired")
    assert damage_of(follower) == []
    await client.close()


@pytest.mark.parametrize("source", ["leader", "address"])
async def test_stopped_replica_is_repaired_from_a_running_one(
    shard, etcd, cluster, coordinator, tmp_path, source
):
    """By `forge pool check --repair`, which finds the leader through etcd, or by an address."""
    replicas = shard("--replication.verify-every-s", "0")
    client, _, stopped = await filled(replicas)
    stopped.kill()
    flip_served(stopped.data_dir, SAID.encode())
    assert damage_of(stopped)
    done = await run_command(
        *("pool", "check", str(stopped.data_dir)),
        *("--repair", source if source == "leader" else client.address),
        *("--etcd", etcd.endpoint, "--cluster", cluster, "--key-file", str(tmp_path / "key")),
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout == f"{stopped.data_dir} is whole\n"
    await client.close()
