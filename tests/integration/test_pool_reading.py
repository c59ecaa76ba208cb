"""Looking into a real pool: queries, tails, counts and very long trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from forge.core.errors import PermissionDenied, Unavailable
from forge.core.token_columns import int32_array
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.status import translated
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from tests.support.pool.process import CALL_S, PoolClient, PoolProcess
from tests.support.pool.records import make_group, make_reward, make_turn, recorded_tree
from tests.support.runtime.etcd import EtcdServer


@pytest_asyncio.fixture(scope="module")
async def pool(
    tmp_path_factory: pytest.TempPathFactory, shared_etcd: EtcdServer
) -> AsyncIterator[PoolProcess]:
    """One pool that all tests of this file share; each has task ids of its own."""
    process = PoolProcess(tmp_path_factory.mktemp("pool"), etcd=shared_etcd, cluster="pool-reading")
    process.start()
    yield process
    process.kill()


@pytest_asyncio.fixture(scope="module")
async def finder(shared_etcd: EtcdServer) -> AsyncIterator[Coordinator]:
    connected = await Coordinator.connect(shared_etcd.endpoint, cluster="pool-reading")
    yield connected
    await connected.close()


@pytest_asyncio.fixture
async def client(pool: PoolProcess, finder: Coordinator) -> AsyncIterator[PoolClient]:
    connected = await PoolClient.connect(pool, finder)
    yield connected
    await connected.close()


async def record(client: PoolClient, *trajectory_ids: str, value: float = 1.0) -> None:
    """Trajectories of one turn, sealed one after the other."""
    answers = await client.append(make_turn(each) for each in trajectory_ids)
    assert all(answer.status_code == 0 for answer in answers)
    for each in trajectory_ids:
        await client.seal(each, 1, [make_reward(value=value)])


async def test_query_returns_matches_page_by_page(client):
    """The second page continues the first, over gRPC as in the store."""
    await record(client, *(f"q{number}:0:0" for number in range(5)), value=0.125)
    wanted = pool_pb2.TrajectoryFilter(min_reward=0.125, max_reward=0.125)
    ids, token = [], ""
    for size in (2, 2, 2):
        request = pool_pb2.QueryTrajectoriesRequest(filter=wanted, page_size=size, page_token=token)
        page = await client.stub.QueryTrajectories(request, timeout=CALL_S)
        ids += [(found.trajectory_id, found.domain) for found in page.trajectories]
        token = page.next_page_token
    assert ids == [(f"q{number}:0:0", "code") for number in range(5)]
    assert token == ""


async def test_late_rewards_are_stored_and_sent_to_tails(client):
    """A reward after the seal is durable, idempotent by its event id, and part of the trajectory
    from then on."""
    await record(client, "late:0:0")
    call = client.stub.TailTrajectories(pool_pb2.TailTrajectoriesRequest(), timeout=CALL_S)
    assert (await call.read()).summary.trajectory_id == ""
    for value in (0.5, 0.75):
        reward = make_reward("later", value)
        request = pool_pb2.AppendRewardsRequest(trajectory_id="late:0:0", rewards=[reward])
        await client.stub.AppendRewards(request, timeout=CALL_S)
    told = await call.read()
    call.cancel()
    assert told.change == pool_pb2.TRAJECTORY_CHANGE_REWARDED
    assert [reward.value for reward in told.summary.rewards] == [0.5, 1.0]
    (fetched,) = await client.fetch("late:0:0")
    assert list(fetched.rewards) == list(told.summary.rewards)


async def test_slow_tail_delays_no_other_and_misses_nothing(client):
    """More trajectories than any buffer holds are closed while one tail is not read; then it gets
    all of them, in order."""
    call = client.stub.TailTrajectories(pool_pb2.TailTrajectoriesRequest(), timeout=CALL_S)
    await call.read()
    ids = [f"lag:{number}:0" for number in range(150)]
    reason = "x" * 4000
    await asyncio.gather(
        *(
            client.stub.SealTrajectory(
                pool_pb2.SealTrajectoryRequest(
                    trajectory_id=each,
                    state=common_pb2.TRAJECTORY_STATE_ABANDONED,
                    reason=reason,
                ),
                timeout=CALL_S,
            )
            for each in ids
        )
    )
    told = [(await call.read()).summary.trajectory_id for _ in ids]
    call.cancel()
    assert sorted(told) == sorted(ids)


async def test_counts_by_domain_are_returned_on_request(client):
    """The plain call stays cheap; the other has domains, states and the longest waiting groups."""
    group = make_group("waits", 7)
    await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=[group], fence=1))
    await record(client, "waits:0:0")
    plain = await client.stub.GetPoolStats(pool_pb2.GetPoolStatsRequest(), timeout=CALL_S)
    assert not plain.trajectory_counts and not plain.group_counts
    request = pool_pb2.GetPoolStatsRequest(by_domain=True)
    stats = await client.stub.GetPoolStats(request, timeout=CALL_S)
    assert sum(count.trajectories for count in stats.trajectory_counts) == stats.trajectories
    assert sum(count.groups for count in stats.group_counts) == stats.groups
    assert stats.oldest_pending_task_id == "waits"
    assert stats.oldest_pending_closed_unix_s > 0


async def test_trajectory_of_200k_tokens_is_read_back_whole(client):
    """One context of 200,000 tokens in 64 turns, the first of them 1.5 MB: every id, log-prob and
    version is equal, and the tree has the whole sequence."""
    turns, length = [], 0
    for index in range(64):
        prompt = range(length, length + (130_000 if index == 0 else 1_000))
        sampled = range(prompt.stop, prompt.stop + 112)
        text = "x" * (1_000_000 if index == 0 else 1_000)
        turns.append(
            make_turn(
                "long:0:0",
                index,
                prefix=length,
                prompt=prompt,
                sampled=sampled,
                version=index,
                messages_json=text,
            )
        )
        length = sampled.stop
    assert length > 200_000
    answers = await client.append(turns)
    assert [answer.status_code for answer in answers] == [0] * len(turns)
    summary = await client.seal("long:0:0", len(turns))
    assert (summary.turns, summary.max_weight_version) == (64, 63)
    (fetched,) = await client.fetch("long:0:0")
    assert list(fetched.turns) == turns
    tree = recorded_tree(fetched.turns)
    assert int32_array(tree.sequence(63)).tolist() == list(range(length))


async def test_query_and_tail_need_an_operator_token(client, pool):
    """An agent's token opens neither; a search for texts needs an admin's."""
    operator = pool.keyring.sign(Claims(subject="ada", scopes=frozenset({"operator"})))
    async with grpc.aio.insecure_channel(client.address) as channel:
        with pytest.raises(PermissionDenied):
            async with translated():
                await pool_pb2_grpc.PoolServiceStub(channel).SearchTrajectories(
                    pool_pb2.SearchTrajectoriesRequest(text="x"),
                    metadata=(("authorization", f"Bearer {operator}"),),
                )
    token = pool.keyring.sign(Claims(subject="agent", scopes=frozenset({"session"})))
    metadata = (("authorization", f"Bearer {token}"),)
    async with grpc.aio.insecure_channel(client.address) as channel:
        stub = pool_pb2_grpc.PoolServiceStub(channel)
        with pytest.raises(PermissionDenied):
            async with translated():
                await stub.QueryTrajectories(pool_pb2.QueryTrajectoriesRequest(), metadata=metadata)
        with pytest.raises(PermissionDenied):
            async with translated():
                async for _ in stub.TailTrajectories(
                    pool_pb2.TailTrajectoriesRequest(), metadata=metadata
                ):
                    pass


async def test_tail_continues_after_a_restart_of_the_pool(client, pool, finder):
    """SIGTERM ends it with UNAVAILABLE and the cursor; the next instance continues from there."""
    call = client.stub.TailTrajectories(pool_pb2.TailTrajectoriesRequest(), timeout=CALL_S)
    begin = await call.read()
    await record(client, "gone:0:0")
    last = await call.read()
    pool.terminate()
    with pytest.raises(Unavailable, match=f"resume from cursor {last.cursor}"):
        async with translated():
            while await call.read() is not grpc.aio.EOF:
                pass
    assert await asyncio.to_thread(pool.wait) == (0, "")
    pool.start()
    again = await PoolClient.connect(pool, finder)
    await record(again, "gone:1:0")
    request = pool_pb2.TailTrajectoriesRequest(cursor=begin.cursor)
    resumed: Any = again.stub.TailTrajectories(request, timeout=CALL_S)
    told = [(await resumed.read()).summary.trajectory_id for _ in range(3)]
    resumed.cancel()
    await again.close()
    assert told == ["", "gone:0:0", "gone:1:0"]
