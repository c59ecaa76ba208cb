"""A shard on two hosts: real processes, a real etcd, and the loss of one replica."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from forge.client.retry import retried
from forge.core.errors import AlreadyExists, ResourceExhausted, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from tests.support.pool.account import Ledger, audit, group_of
from tests.support.pool.load import Writer
from tests.support.pool.process import CALL_S, START_S, PoolClient, PoolProcess
from tests.support.pool.records import make_group, make_reward
from tests.support.pool.shard import ReplicatedShard
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import LIMIT_S, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

WRITERS = 3
OUTCOME = common_pb2.REWARD_KIND_OUTCOME

MakeShard = Callable[..., ReplicatedShard]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    Keyring.generate(tmp_path / "key")
    return tmp_path / "key"


@pytest_asyncio.fixture
async def shard(
    tmp_path: Path, key_file: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[MakeShard]:
    """A shard with the settings given, empty or with a first group, both processes started."""
    made: list[ReplicatedShard] = []
    keepers: list[asyncio.Task[None]] = []

    def make(*settings: str, first: common_pb2.GroupRecord | None = None) -> ReplicatedShard:
        made.append(
            ReplicatedShard(
                tmp_path,
                etcd=etcd,
                coordinator=coordinator,
                cluster=cluster,
                shard="s0",
                key_file=key_file,
                settings=settings,
            )
        )
        if first is not None:
            made[-1].put_before_start(first)
        made[-1].start()
        keepers.append(asyncio.create_task(made[-1].keep_running()))
        return made[-1]

    yield make
    for keeper in keepers:
        keeper.cancel()
    await asyncio.gather(*keepers, return_exceptions=True)
    for one in made:
        one.stop()


@pytest_asyncio.fixture
async def pools(
    key_file: Path, coordinator: Coordinator
) -> AsyncIterator[Remote[pool_pb2_grpc.PoolServiceAsyncStub]]:
    """The pool as gateway, scheduler and trainer find it."""
    channels = Channels(Security(Keyring.from_file(key_file), subject="test"))
    yield Remote(coordinator, channels, kind="pool", stub=pool_pb2_grpc.PoolServiceStub)
    await channels.close()


async def put(client: PoolClient, task_id: str, *, payload_json: str = "{}") -> None:
    group = make_group(task_id, payload_json=payload_json)
    request = pool_pb2.PutGroupsRequest(groups=[group], fence=1)
    async with translated():
        await client.stub.PutGroups(request, timeout=CALL_S)


async def put_once_it_is_taken(client: PoolClient, task_id: str) -> None:
    """The follower may still be on its way."""
    await retried(lambda: put(client, task_id), retry_for_s=LIMIT_S)


async def listed_by_leader(replicas: ReplicatedShard) -> set[str]:
    client = await replicas.client()
    try:
        async with translated():
            return {one.group.task.task_id for one in await client.groups()}
    finally:
        await client.close()


async def in_sync(replicas: ReplicatedShard) -> None:
    """From here on the follower has all that is acknowledged."""

    async def two_copies() -> bool:
        return (await replicas.leader())[1].metadata.get("copies") == "2"

    await until(two_copies)


async def test_killed_leader_loses_no_acknowledged_write(shard, pools):
    """kill -9 under load: the other replica leads with all of it, and accepts the rest when the
    first is back as its follower."""
    replicas = shard()
    ledger = Ledger()
    names = (f"t{number}" for number in itertools.count())
    async with asyncio.TaskGroup() as tasks:
        writers = [
            tasks.create_task(Writer(pools, "s0", ledger).fill(names)) for _ in range(WRITERS)
        ]
        await ledger.reach(20)
        await replicas.kill_leader()
        await replicas.audit(ledger)
        replicas.start()
        await ledger.reach(ledger.count + 20)
        for writer in writers:
            writer.cancel()
    await replicas.audit(ledger)
    await Writer(pools, "s0", ledger).check_fence()


async def test_second_outcome_is_refused_by_both_replicas(shard):
    """By the leader, and after its death by its follower."""
    replicas = shard(first=make_group("t"))
    await in_sync(replicas)
    client = await replicas.client()
    await client.seal("t:0:0", 0, [make_reward("first", 0.0, kind=OUTCOME)])
    second = pool_pb2.AppendRewardsRequest(
        trajectory_id="t:0:0", rewards=[make_reward("second", 1000.0, kind=OUTCOME)]
    )

    async def append_second() -> None:
        client = await replicas.client()
        async with translated():
            await client.stub.AppendRewards(second, timeout=CALL_S)

    with pytest.raises(AlreadyExists, match=r"has outcome 0 .*'first'"):
        await append_second()
    await replicas.kill_leader()
    replicas.start()
    with pytest.raises(AlreadyExists, match=r"has outcome 0 .*'first'"):
        await retried(append_second, retry_for_s=LIMIT_S)


async def test_replica_continues_alone_if_one_copy_is_enough(shard, pools):
    """kill -9 under load with `min_copies` 1: the survivor accepts writes until the first is back.
    That one then follows, and has all of it when the survivor is killed in turn."""
    replicas = shard("--replication.min-copies", "1", first=group_of("t0"))
    ledger = Ledger()
    names = (f"t{number}" for number in itertools.count())
    async with asyncio.TaskGroup() as tasks:
        writers = [
            tasks.create_task(Writer(pools, "s0", ledger).fill(names)) for _ in range(WRITERS)
        ]
        await ledger.reach(20)
        await in_sync(replicas)
        first = await replicas.kill_leader()
        survivor, _ = await replicas.leader()
        assert survivor is not first
        await ledger.reach(ledger.count + 40)
        await replicas.audit(ledger)
        assert (await replicas.leader())[1].metadata["copies"] == "1"
        replicas.start()
        await in_sync(replicas)
        await ledger.reach(ledger.count + 20)
        assert await replicas.kill_leader() is survivor
        await replicas.audit(ledger)
        await ledger.reach(ledger.count + 20)
        for writer in writers:
            writer.cancel()
    assert (await replicas.leader())[0] is first
    await replicas.audit(ledger)
    await Writer(pools, "s0", ledger).check_fence()


async def test_writers_see_a_full_follower_as_a_full_disk(shard):
    """Not as an absent follower: the status names it, until there is room again."""
    replicas = shard(first=make_group("before"))
    client = await replicas.client()
    await put_once_it_is_taken(client, "before")
    leader, _ = await replicas.leader()
    (follower,) = (each for each in replicas.processes if each is not leader)
    _, most = resource.prlimit(follower.pid, resource.RLIMIT_FSIZE)
    full_bytes = (follower.data_dir / "data.mdb").stat().st_size
    resource.prlimit(follower.pid, resource.RLIMIT_FSIZE, (full_bytes, most))
    with pytest.raises(ResourceExhausted, match="the follower of pool shard s0 has no room"):
        for number in itertools.count():
            # What was under way when it found out is told as it would be of one that went away.
            with suppress(Unavailable):
                await put(client, f"big-{number}", payload_json=json.dumps("x" * 500_000))
    resource.prlimit(follower.pid, resource.RLIMIT_FSIZE, (most, most))
    await put_once_it_is_taken(client, "after")


async def test_deposed_leader_acknowledges_no_write(shard):
    """Frozen until the other replica leads, then thawed: it acknowledges no write, and it ends.
    With `min_copies` 1 the new leader continues alone, and only it may lead again."""
    replicas = shard(
        "--replication.min-copies", "1", "--lease-ttl-s", "4", first=make_group("before")
    )
    client = await replicas.client()
    await put_once_it_is_taken(client, "before")
    await in_sync(replicas)
    await put(client, "in-both")
    (begin, *_) = await client.groups(since="")
    deposed, _ = await replicas.freeze_leader()
    assert deposed.process is not None
    frozen, deposed.process = deposed.process, None
    try:
        successor = await replicas.client()
        await put_once_it_is_taken(successor, "after")
        late = asyncio.create_task(put(client, "late"))
        frozen.send_signal(signal.SIGCONT)
        with pytest.raises(Unavailable):
            await late
        listed = {one.group.task.task_id for one in await successor.groups()}
        assert listed == {"before", "in-both", "after"}
        # A mark of one replica has no meaning for the other.
        (begin_again, *changed) = await successor.groups(since=begin.begin.mark)
        assert (begin_again.begin.changes_only, len(changed)) == (False, 3)
        assert await asyncio.to_thread(frozen.wait) == 0
    finally:
        frozen.kill()
        frozen.communicate()
    await client.close()
    await successor.close()


async def test_etcd_outage_stops_no_writes(own_etcd, tmp_path):
    """With etcd frozen until the lease is over the leader keeps acknowledging, since its follower
    confirms and no other can be elected; afterwards the next leader has all writes."""
    key_file = tmp_path / "key"
    Keyring.generate(key_file)
    coordinator = await Coordinator.connect(own_etcd.endpoint, cluster="outage")
    replicas = ReplicatedShard(
        tmp_path,
        etcd=own_etcd,
        coordinator=coordinator,
        cluster="outage",
        shard="s0",
        key_file=key_file,
        settings=("--lease-ttl-s", "4"),
    )
    replicas.put_before_start(make_group("before"))
    replicas.start()
    keeper = asyncio.create_task(replicas.keep_running())
    channels = Channels(Security(Keyring.from_file(key_file), subject="test"))
    pools = Remote(coordinator, channels, kind="pool", stub=pool_pb2_grpc.PoolServiceStub)
    try:
        leader, _ = await replicas.leader()
        client = await replicas.client()
        await put_once_it_is_taken(client, "before")
        own_etcd.freeze()
        await until(lambda: "lease_lost" in leader.log_path.read_text())
        await put(client, "during")
        await client.close()
        own_etcd.thaw()
        after = pool_pb2.PutGroupsRequest(groups=[make_group("after")], fence=1)
        await pools.call("PutGroups", after, timeout_s=CALL_S, retry_for_s=START_S)
        # The old leader answers UNAVAILABLE once its follower was elected, and the retry asks that.
        listed = await retried(lambda: listed_by_leader(replicas), retry_for_s=START_S)
        assert listed == {"before", "during", "after"}
    finally:
        keeper.cancel()
        await asyncio.wait({keeper})
        replicas.stop()
        await channels.close()
        await coordinator.close()


async def test_shard_moves_to_another_host(
    tmp_path: Path,
    key_file: Path,
    etcd: EtcdServer,
    cluster: str,
    coordinator: Coordinator,
    pools: Remote[pool_pb2_grpc.PoolServiceAsyncStub],
):
    """As docs/pool.md says: an unreplicated shard is replicated to a second host, the first is
    drained and its disk removed, while writers continue; every acknowledged write has moved."""
    old, new = (
        PoolProcess(tmp_path / name, etcd=etcd, cluster=cluster, shard="s0", key_file=key_file)
        for name in ("old", "new")
    )
    # On a busy machine who lives may be silent for seconds.
    ttl = ("--lease-ttl-s", "10")
    replicated = ("--replication.durability", "replicated", "--replication.min-copies", "1", *ttl)
    ledger = Ledger()
    names = (f"t{number}" for number in itertools.count())
    try:
        old.start(*ttl)
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(Writer(pools, "s0", ledger).fill(names))
            await ledger.reach(20)
            await ended(old)
            old.start(*replicated)
            new.start(*replicated)
            await coordinator.discover("pool").wait(
                timeout_s=START_S, where=lambda one: one.metadata.get("copies") == "2"
            )
            await ledger.reach(ledger.count + 10)
            await ended(old)
            shutil.rmtree(old.data_dir)
            await ledger.reach(ledger.count + 10)
            await ended(new)
            new.start(*ttl)
            await ledger.reach(ledger.count + 10)
            writer.cancel()
        client = await PoolClient.connect(new, coordinator)
        await audit(client, ledger)
        await client.close()
    finally:
        old.kill()
        new.kill()


async def ended(process: PoolProcess) -> None:
    """SIGTERM, as systemd stops it."""
    process.terminate()
    code, stderr = await asyncio.to_thread(process.wait)
    assert code == 0, stderr
    process.process = None
