"""A real pool instance, found through a real etcd, spoken to over gRPC."""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from forge.core.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    StaleFence,
    Unauthenticated,
    Unavailable,
)
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.chunks import split
from forge.runtime.rpc.status import translated
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from tests.support.pool.process import CALL_S, START_S, PoolClient, PoolProcess
from tests.support.pool.records import damage, make_group, make_reward, make_turn
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until

Start = Callable[..., Awaitable[PoolClient]]
HELD_COPY = """
import sys, threading, time

if "backup" in sys.orig_argv:
    threading.Thread.start = lambda thread: time.sleep(600)
"""
"""Run when an interpreter starts: who makes a copy has a directory for it, and gets no further."""


@pytest_asyncio.fixture
async def pool(tmp_path: Path, etcd: EtcdServer, cluster: str) -> AsyncIterator[PoolProcess]:
    """A pool process, not started yet."""
    process = PoolProcess(tmp_path / "pool", etcd=etcd, cluster=cluster)
    yield process
    process.kill()


@pytest_asyncio.fixture
async def start(pool: PoolProcess, coordinator: Coordinator) -> AsyncIterator[Start]:
    """Starts the pool with further settings and connects to it."""
    clients: list[PoolClient] = []

    async def start_(*settings: str) -> PoolClient:
        pool.start(*settings)
        clients.append(await PoolClient.connect(pool, coordinator))
        return clients[-1]

    yield start_
    for client in clients:
        await client.close()


def code(name: str) -> int:
    return grpc.StatusCode[name].value[0]


async def test_group_passes_through_every_state(start, coordinator):
    """Registered under its shard; groups and turns stored, sealed, listed, fetched, counted."""
    client = await start()
    (instance,) = await coordinator.discover("pool").wait(timeout_s=START_S)
    assert instance.metadata["shard"] == "s0"
    await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=[make_group()], fence=1))
    turns = [make_turn(index=index, prefix=5 * index) for index in range(4)]
    answers = await client.append(turns)
    assert [(a.sequence, a.status_code) for a in answers] == [(index, 0) for index in range(4)]
    summary = await client.seal("task:0:0", 4, [make_reward()])
    (listed,) = await client.groups()
    assert listed.group.task == make_group().task
    assert listed.trajectories == [summary]
    (trajectory,) = await client.fetch("task:0:0")
    assert list(trajectory.turns) == turns
    assert trajectory.rewards == [make_reward()]
    request = pool_pb2.GetSummariesRequest(trajectory_ids=["task:9:9", "task:0:0"])
    assert (await client.stub.GetSummaries(request)).summaries == [summary]
    stats = await client.stub.GetPoolStats(pool_pb2.GetPoolStatsRequest())
    assert (stats.groups, stats.trajectories, stats.turns) == (1, 1, 4)


async def test_trajectory_of_200k_tokens_is_stored(start):
    """Turns of any size go through in chunks, in one turn or in many, and are read back equal."""
    client = await start("--store.map-bytes", str(1 << 20))
    huge = make_turn("huge:0:0", prompt=range(100_000), sampled=range(100_000))
    many = [
        make_turn("many:0:0", index, prefix=4000 * index, prompt=range(3000), sampled=range(1000))
        for index in range(50)
    ]
    answers = await client.append([huge, *many])
    assert all(answer.status_code == 0 for answer in answers)
    assert (await client.seal("many:0:0", 50)).sampled_tokens == 50_000
    first, second = await client.fetch("huge:0:0", "many:0:0")
    assert list(first.turns) == [huge]
    assert list(second.turns) == many


async def test_each_turn_has_its_own_answer(start):
    """Good turns are stored although others on the stream are refused; answers keep the order."""
    client = await start("--max-turn-bytes", str(1 << 20))
    await client.append([make_turn("shut:0:0")])
    await client.seal("shut:0:0", 1)
    nameless = make_turn("t:0:0", 1)
    nameless.trajectory_id = "nameless"
    sent = [
        (make_turn("t:0:0", 0), "OK", ""),
        (make_turn("t:0:0", 0, sampled=(9,)), "ABORTED", "already stored"),
        (nameless, "INVALID_ARGUMENT", "trajectory_id 'nameless'"),
        (
            make_turn("t:0:0", 1, messages_json="x" * (3 << 20)),
            "INVALID_ARGUMENT",
            "max_turn_bytes",
        ),
        (make_turn("shut:0:0", 1), "FAILED_PRECONDITION", "takes no turn 1"),
        (make_turn("t:0:0", 1), "OK", ""),
    ]
    answers = await client.append(turn for turn, _, _ in sent)
    for sequence, (answer, (_, status, complaint)) in enumerate(zip(answers, sent, strict=True)):
        assert (answer.sequence, answer.status_code) == (sequence, code(status))
        assert complaint in answer.error
    assert (await client.seal("t:0:0", 2)).turns == 2


async def test_mixed_chunks_end_the_stream(start):
    """Interleaved chunks of two turns cannot be separated: INVALID_ARGUMENT, nothing stored."""
    client = await start()
    chunks = split(make_turn("t:0:0", messages_json="x" * (2 << 20)).SerializeToString())
    # Two and no more: whoever writes on while a stream is refused may not see grpc's status for it.
    requests = [
        pool_pb2.AppendTurnsRequest(sequence=sequence, turn=chunk)
        for sequence, chunk in zip(range(2), chunks, strict=False)
    ]
    with pytest.raises(InvalidArgument, match="sequence 1 came before the last one of 0"):
        async with translated():
            await client.exchange(requests)
    stats = await client.stub.GetPoolStats(pool_pb2.GetPoolStatsRequest())
    assert stats.turns == 0


async def test_invalid_calls_get_their_status(start):
    """A reward that is no number, an early seal, an unknown id, a stale fence: each is named."""
    client = await start()
    bad = pool_pb2.AppendRewardsRequest(
        trajectory_id="t:0:0", rewards=[make_reward(value=math.nan)]
    )
    with pytest.raises(InvalidArgument, match="value nan"):
        async with translated():
            await client.stub.AppendRewards(bad)
    with pytest.raises(FailedPrecondition, match="lacks 2 of its 2 turns: 0, 1"):
        async with translated():
            await client.seal("t:0:0", 2)
    with pytest.raises(NotFound, match="t:7:0"):
        async with translated():
            await client.fetch("t:7:0")
    await client.stub.PutGroups(pool_pb2.PutGroupsRequest(fence=9))
    with pytest.raises(StaleFence, match="fence 8"):
        async with translated():
            await client.stub.SetGroupStates(pool_pb2.SetGroupStatesRequest(fence=8))


async def test_scan_lists_thousands_of_groups_in_order(start):
    """Many pages make one listing, in queue order for any order of arrival; a scheduler gets a page
    per response."""
    client = await start()
    groups = [make_group(f"t{index}", index) for index in range(3000)]
    for begin in range(2000, -1, -1000):
        request = pool_pb2.PutGroupsRequest(groups=groups[begin : begin + 1000], fence=1)
        await client.stub.PutGroups(request)
    listed = [response.group.queue_index for response in await client.groups()]
    assert listed == list(range(3000))
    scan = client.stub.ScanGroups(pool_pb2.ScanGroupsRequest(together=True), timeout=CALL_S)
    responses = [response async for response in scan]
    together = [each.group.queue_index for first in responses for each in (first, *first.more)]
    assert together == list(range(3000))
    assert len(responses) < 10


async def test_scan_by_mark_lists_later_changes(start, pool):
    """A standby scheduler requests only these, until another process serves the shard."""
    client = await start()
    groups = [make_group(f"t{index}", index) for index in range(600)]
    await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=groups, fence=1))
    begin, *listed = await client.groups(since="")
    assert (begin.begin.changes_only, len(listed)) == (False, 600)
    changed = pool_pb2.SetGroupStatesRequest.Change(
        task_id="t7", state=common_pb2.GROUP_STATE_TRAINED, step=1
    )
    await client.stub.SetGroupStates(
        pool_pb2.SetGroupStatesRequest(changes=[changed, changed], fence=1)
    )
    late, only = await client.groups(since=begin.begin.mark)
    assert late.begin.changes_only
    assert (only.group.task.task_id, only.group.step) == ("t7", 1)
    assert len(await client.groups(since=late.begin.mark)) == 1
    pool.kill()
    client = await start()
    begin_again, *listed = await client.groups(since=late.begin.mark)
    assert (begin_again.begin.changes_only, len(listed)) == (False, 600)


@pytest.mark.parametrize(
    ("scopes", "read_error", "write_error"),
    [
        (None, Unauthenticated, Unauthenticated),
        ("session", PermissionDenied, PermissionDenied),
        ("runner", PermissionDenied, PermissionDenied),
        ("operator", None, PermissionDenied),
    ],
)
async def test_writes_need_a_service_token_and_reads_an_operator_token(
    start, pool, scopes, read_error, write_error
):
    """Without the scope no caller reads a trajectory or writes a record."""
    client = await start()
    metadata: tuple[tuple[str, str], ...] = ()
    if scopes is not None:
        token = pool.keyring.sign(Claims(subject="somebody", scopes=frozenset({scopes})))
        metadata = (("authorization", f"Bearer {token}"),)
    async with grpc.aio.insecure_channel(client.address) as channel:
        stub = pool_pb2_grpc.PoolServiceStub(channel)
        read = stub.GetSummaries(pool_pb2.GetSummariesRequest(), metadata=metadata)
        write = stub.PutGroups(pool_pb2.PutGroupsRequest(fence=1), metadata=metadata)
        for call, error in ((read, read_error), (write, write_error)):
            if error is None:
                await call
            else:
                with pytest.raises(error):
                    async with translated():
                        await call


async def test_draining_pool_answers_every_accepted_turn(start, pool):
    """SIGTERM ends an open stream with UNAVAILABLE after its last answer, and the process with 0;
    the next process has every acknowledged turn."""
    client = await start()
    first_answered = asyncio.Event()
    acknowledged = []

    async def requests():
        for chunk in split(make_turn("t:0:0").SerializeToString()):
            yield pool_pb2.AppendTurnsRequest(sequence=0, turn=chunk)
        await first_answered.wait()
        pool.terminate()
        await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="draining"):
        async with translated():
            async for answer in client.stub.AppendTurns(requests(), timeout=CALL_S):
                acknowledged.append(answer.sequence)
                first_answered.set()
    assert await asyncio.to_thread(pool.wait) == (0, "")
    assert acknowledged == [0]
    client = await start()
    assert len((await client.fetch("t:0:0"))[0].turns) == 1


@pytest.mark.faults
async def test_shard_at_its_map_limit_is_resource_exhausted(start, pool):
    """A full shard answers each turn RESOURCE_EXHAUSTED, keeps reading, and accepts the same turns
    once it may grow."""
    client = await start("--store.map-bytes", str(1 << 20), "--store.map-max-bytes", str(1 << 20))
    await client.append([make_turn("t:0:0")])
    (refused,) = await client.append([make_turn("t:1:0", messages_json="x" * (2 << 20))])
    assert refused.status_code == code("RESOURCE_EXHAUSTED")
    assert "map_max_bytes 1048576" in refused.error
    assert len(await client.fetch("t:0:0")) == 1
    pool.kill()
    client = await start()
    (taken,) = await client.append([make_turn("t:1:0", messages_json="x" * (2 << 20))])
    assert taken.status_code == 0


@pytest.mark.faults
async def test_process_survives_a_full_disk(start, pool):
    """Every write is RESOURCE_EXHAUSTED while the disk is full, acknowledged data is readable all
    the time, and refused writes are accepted once there is room."""
    client = await start()
    _, most = resource.prlimit(pool.pid, resource.RLIMIT_FSIZE)
    full_bytes = (pool.data_dir / "data.mdb").stat().st_size + (4 << 20)
    resource.prlimit(pool.pid, resource.RLIMIT_FSIZE, (full_bytes, most))
    turns = [make_turn("t:0:0", n, messages_json="x" * 500_000) for n in range(20)]
    answers = await client.append(turns[:1])
    while answers[-1].status_code == 0:
        answers += await client.append([turns[len(answers)]])
    stored = len(answers) - 1
    assert stored > 1
    for answer in [answers[-1], *await client.append(turns[stored:])]:
        assert answer.status_code == code("RESOURCE_EXHAUSTED")
        assert "nothing of it is stored" in answer.error
    assert list((await client.fetch("t:0:0"))[0].turns) == turns[:stored]
    resource.prlimit(pool.pid, resource.RLIMIT_FSIZE, (most, most))
    assert {answer.status_code for answer in await client.append(turns[stored:])} == {0}
    assert (await client.seal("t:0:0", len(turns))).turns == len(turns)
    assert list((await client.fetch("t:0:0"))[0].turns) == turns
    assert not pool.ended


@pytest.mark.faults
async def test_damaged_record_is_data_loss_to_its_reader_only(start, pool):
    """A flipped byte is DATA_LOSS for its trajectory; the shard serves on."""
    client = await start()
    await client.append([make_turn("t:0:0", messages_json="NEEDLE"), make_turn("t:1:0")])
    pool.kill()
    damage(pool.data_dir, b"NEEDLE")
    client = await start()
    with pytest.raises(DataLoss, match="checksum"):
        async with translated():
            await client.fetch("t:0:0")
    assert len(await client.fetch("t:1:0")) == 1


async def test_two_instances_cannot_share_a_directory(start, pool, tmp_path, etcd, cluster):
    """The second one is refused in one line, exits with 2, and does not harm the first."""
    client = await start()
    second = PoolProcess(tmp_path / "pool", etcd=etcd, cluster=cluster)
    second.start()
    exit_code, stderr = await asyncio.to_thread(second.wait)
    assert exit_code == 2
    assert stderr.count("\n") == 1
    assert "in use by another pool instance" in stderr
    (answer,) = await client.append([make_turn()])
    assert answer.status_code == 0


async def test_shard_cannot_be_renamed_by_a_setting(start, pool, tmp_path, etcd, cluster):
    """A start in a directory of another shard is refused in one line with both names."""
    await start()
    pool.kill()
    other = PoolProcess(tmp_path / "pool", etcd=etcd, cluster=cluster, shard="s1")
    other.start()
    exit_code, stderr = await asyncio.to_thread(other.wait)
    assert (exit_code, stderr.count("\n")) == (2, 1)
    assert "'s1'" in stderr and "'s0'" in stderr


@pytest.mark.faults
async def test_compaction_ends_with_its_call_and_with_its_process(
    start, pool, tmp_path, monkeypatch
):
    """A cancelled call ends it, and the shard can be compacted again; a stopping process does not
    wait for it, and leaves no copy."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    held = tmp_path / "sitecustomize.py"
    held.write_text(HELD_COPY)
    client = await start()
    await client.append([make_turn()])
    request = pool_pb2.CompactShardRequest()
    inode = (pool.data_dir / "data.mdb").stat().st_ino
    call = client.stub.CompactShard(request, timeout=CALL_S)
    assert (await call.read()).total_bytes > 0
    await until(lambda: left_of_copies(pool))
    call.cancel()
    await until(lambda: not left_of_copies(pool))
    assert (pool.data_dir / "data.mdb").stat().st_ino == inode
    held.unlink()

    async def compacted() -> list[pool_pb2.CompactShardResponse]:
        # The first may still be on its way out.
        with suppress(FailedPrecondition):
            async with translated():
                return [one async for one in client.stub.CompactShard(request, timeout=CALL_S)]
        return []

    responses = await until(compacted)
    assert responses[-1].after_bytes > 0
    assert (pool.data_dir / "data.mdb").stat().st_ino != inode
    held.write_text(HELD_COPY)
    last = client.stub.CompactShard(request, timeout=CALL_S)
    await last.read()
    await until(lambda: left_of_copies(pool))
    pool.terminate()
    assert (await asyncio.to_thread(pool.wait))[0] == 0
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while (await last.read()) is not grpc.aio.EOF:
            pass
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not left_of_copies(pool)


def left_of_copies(pool: PoolProcess) -> list[Path]:
    return [path for path in pool.data_dir.iterdir() if "compacted" in path.name]
