"""A leader of a shard: accepted followers, the record in etcd, and its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from forge.core.errors import (
    ConfigError,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    StaleFence,
    Unavailable,
)
from forge.runtime.coordination import Coordinator, Leadership, Versioned
from services.pool.config import PoolConfig, ReplicationSettings
from services.pool.readers import ReaderThreads
from services.pool.replication.election import serve_alone
from services.pool.replication.leader import Leader
from services.pool.replication.replica_set import ReplicaSet
from tests.support.pool.records import make_group
from tests.support.pool.replicas import LINEAGE, SHARD, Node, catching_up, delivering
from tests.support.pool.store import put_groups
from tests.support.runtime.waiting import settle, until

FENCE = 7


@dataclass
class Etcd(Coordinator):
    """Stands in for the coordinator: the record and the leader's key, which may be unreachable."""

    stored: Versioned | None = None
    leader: Versioned | None = None
    down: bool = False
    failed_calls: int = 0
    before_write: Callable[[], None] = lambda: None

    async def get(self, key: str) -> Versioned | None:
        await asyncio.sleep(0)
        self._check()
        return self.leader if key.startswith("leader/") else self.stored

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        await asyncio.sleep(0)
        self._check()
        revision = self.stored.mod_revision if self.stored else 0
        if revision != expected_revision:
            raise StaleFence(f"{key} is at revision {revision}")
        self.before_write()
        self.stored = Versioned(value=value, mod_revision=revision + 1)
        return revision + 1

    async def campaign(self, name: str, instance_id: str, *, ttl_s: float = 5.0) -> Lease:
        return Lease()

    def _check(self) -> None:
        if self.down:
            self.failed_calls += 1
            raise Unavailable("etcd does not answer")


class Lease(Leadership):
    """Stands in for a leadership that holds, or has ended."""

    def __init__(self, *, expired: bool = False) -> None:
        self.fence = FENCE
        self._expired = expired

    @property
    def alive(self) -> bool:
        return True

    async def lost(self) -> None:
        if not self._expired:
            await asyncio.Event().wait()


@dataclass
class Shard:
    """A leader with its store, its etcd, and a follower that may join."""

    leader: Leader
    node: Node
    other: Node
    etcd: Etcd
    seen: list[tuple[int, str]]
    """Copies and refusal at each change."""

    async def in_sync(self) -> frozenset[str]:
        found = await ReplicaSet.read(self.etcd, SHARD)
        return found.in_sync if found else frozenset()

    @property
    def ids(self) -> tuple[str, str]:
        return self.node.state().replica_id, self.other.state().replica_id

    async def until_joined(self) -> None:
        async def joined() -> bool:
            gate = self.leader.gate
            open_for_writes = gate.required and not gate.is_shut
            return open_for_writes and await self.in_sync() == set(self.ids)

        await until(joined)

    def write(self, task_id: str) -> None:
        put_groups(self.node.store, make_group(task_id))


@pytest_asyncio.fixture
async def make_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[int], Shard]]:
    """Makes a shard with this `min_copies`; its leader has not begun."""
    monkeypatch.setattr("services.pool.replication.leader.RETRY_S", 0.001)
    readers = ReaderThreads(1)
    made: list[Shard] = []

    def make(min_copies: int) -> Shard:
        node, other = Node(tmp_path / "a"), Node(tmp_path / "b")
        node.lead()
        etcd = Etcd()
        state = node.state()
        members = ReplicaSet(
            shard=SHARD,
            lineage=LINEAGE,
            in_sync=frozenset({state.replica_id, other.state().replica_id}),
            fence=FENCE,
        )
        seen: list[tuple[int, str]] = []
        leader = Leader(
            PoolConfig(replication=ReplicationSettings(min_copies=min_copies)),
            etcd,
            Lease(),
            members,
            node.store,
            readers,
            state=state,
            on_change=lambda: seen.append((leader.copies, leader.refusal)),
        )
        node.store.count_commits(leader.committed)
        made.append(Shard(leader, node, other, etcd, seen))
        return made[-1]

    yield make
    for shard in made:
        await shard.leader.close()
        shard.node.store.close()
        shard.other.store.close()
    await readers.close()


async def test_leader_waits_for_the_record_before_it_serves_alone(make_shard):
    """With etcd unreachable a lone leader refuses writes, although one copy is enough."""
    shard = make_shard(1)
    shard.etcd.down = True
    with pytest.raises(Unavailable):
        await shard.leader.begin()
    with pytest.raises(Unavailable, match="is not accepting writes"):
        shard.leader.gate.admit()
    shard.etcd.down = False
    await shard.leader.begin()
    assert await shard.in_sync() == {shard.ids[0]}
    shard.leader.gate.admit()


async def test_elected_leader_asks_an_unreachable_etcd_with_pauses(make_shard, monkeypatch):
    """Not as fast as it is refused."""
    shard = make_shard(1)
    await shard.leader.begin()
    shard.leader.leadership = Lease(expired=True)
    shard.etcd.down = True
    monkeypatch.setattr("services.pool.replication.leader.RETRY_S", 60.0)
    holding = asyncio.create_task(shard.leader.hold())
    await until(lambda: shard.etcd.failed_calls)
    await settle()
    assert shard.etcd.failed_calls == 1
    holding.cancel()
    await asyncio.wait({holding})


async def test_lone_leader_refuses_writes_if_two_copies_are_required(make_shard):
    """The record stays: the replicas in sync have all acknowledged writes."""
    shard = make_shard(2)
    await shard.leader.begin()
    assert await shard.in_sync() == set(shard.ids)
    with pytest.raises(Unavailable, match="min_copies is 2"):
        shard.leader.gate.admit()


async def test_follower_has_every_commit_before_it_is_recorded(make_shard):
    """From the moment it is in the record it may be elected."""
    shard = make_shard(1)
    await shard.leader.begin()
    shard.write("alone")
    seen = []
    shard.etcd.before_write = lambda: seen.append(
        shard.other.state().position >= shard.leader.gate.position
    )
    link = shard.leader.accept(shard.other.follower_state())
    shard.write("while-it-joins")
    async with delivering(link, shard.other):
        await shard.until_joined()
        assert seen == [True]
        assert shard.leader.gate.required


@pytest.mark.parametrize("min_copies", [1, 2])
async def test_loss_of_a_follower_is_recorded_before_answers_are_sent(make_shard, min_copies):
    """Waiting answers are sent once the leader is recorded as alone, or refused if two copies are
    required."""
    shard = make_shard(min_copies)
    await shard.leader.begin()
    link = shard.leader.accept(shard.other.follower_state())
    async with delivering(link, shard.other):
        await shard.until_joined()
        shard.etcd.down = True
    shard.write("unconfirmed")
    waiting = asyncio.create_task(shard.leader.gate.passed(timeout_s=60.0))
    if min_copies == 1:
        await until(lambda: shard.etcd.failed_calls)
        assert not waiting.done()
        shard.etcd.down = False
        await waiting
        assert await shard.in_sync() == {shard.ids[0]}
    else:
        with pytest.raises(Unavailable, match="its follower is not connected"):
            await waiting


async def test_leader_shows_a_lost_follower_as_a_missing_copy(make_shard):
    """The record still names both replicas; people see one copy, and the reason of the refusals."""
    shard = make_shard(2)
    await shard.leader.begin()
    required = "replication.min_copies is 2"
    assert shard.seen == [(1, f"no follower has joined, and {required}")]
    link = shard.leader.accept(shard.other.follower_state())
    async with delivering(link, shard.other):
        await shard.until_joined()
        assert shard.seen[1:] == [(2, "")]
    await until(lambda: len(shard.seen) == 3)
    copies, refusal = shard.seen[-1]
    assert copies == 1 and refusal.startswith("its follower is not connected")
    assert await shard.in_sync() == set(shard.ids)
    state = shard.other.follower_state()
    state.no_room = "no space left on device"
    shard.leader.accept(state)
    assert shard.seen[-1] == (1, "its follower has no room (no space left on device)")


async def test_leader_that_may_be_alone_shows_one_copy(make_shard):
    """With one required copy it refuses nothing; a follower is a second copy."""
    shard = make_shard(1)
    await shard.leader.begin()
    link = shard.leader.accept(shard.other.follower_state())
    async with delivering(link, shard.other):
        await shard.until_joined()
    await until(lambda: len(shard.seen) == 3)
    assert shard.seen == [(1, ""), (2, ""), (1, "")]


async def test_deposed_leader_finds_the_record_changed(make_shard):
    """Another leader has written it under its own fence: waiting answers are refused, and the
    leadership ends."""
    shard = make_shard(1)
    await shard.leader.begin()
    link = shard.leader.accept(shard.other.follower_state())
    async with delivering(link, shard.other):
        await shard.until_joined()
        found = await ReplicaSet.read(shard.etcd, SHARD)
        assert found is not None
        successor = ReplicaSet(
            shard=SHARD,
            lineage=LINEAGE,
            in_sync=found.in_sync,
            fence=FENCE + 1,
            revision=found.revision,
        )
        await successor.write(shard.etcd)
    shard.write("unconfirmed")
    with pytest.raises(Unavailable):
        await shard.leader.gate.passed(timeout_s=60.0)
    await shard.leader.hold()
    with pytest.raises(Unavailable, match="is no longer the leader"):
        shard.leader.gate.admit()
    found = await ReplicaSet.read(shard.etcd, SHARD)
    assert found is not None and found.fence == FENCE + 1


async def test_applied_write_with_unknown_outcome_is_recognized(make_shard):
    """A record at a later revision under our fence deposes no leader."""
    shard = make_shard(1)
    ours = ReplicaSet(
        shard=SHARD, lineage=LINEAGE, in_sync=shard.leader.members.in_sync, fence=FENCE
    )
    await ours.write(shard.etcd)
    await shard.leader.begin()
    assert await shard.in_sync() == {shard.ids[0]}
    assert not shard.leader.deposed.is_set()


async def test_unfit_followers_are_refused_by_name(make_shard):
    """Another shard, foreign data, another schema, a replica that led since, and a second
    follower."""
    shard = make_shard(2)
    await shard.leader.begin()
    state = shard.other.follower_state()
    for change, error, complaint in (
        ({"pool_shard": "s9"}, InvalidArgument, "'s9' is not led here"),
        ({"lineage": "unreplicated"}, FailedPrecondition, "empty data_dir"),
        ({"schema_version": 1}, FailedPrecondition, "stores schema 1"),
        ({"newest_term": FENCE + 1}, FailedPrecondition, f"leadership {FENCE + 1} .* than {FENCE}"),
    ):
        wrong = type(state)()
        wrong.CopyFrom(state)
        for name, value in change.items():
            setattr(wrong, name, value)
        with pytest.raises(error, match=complaint):
            shard.leader.accept(wrong)
    shard.leader.accept(state)
    second = type(state)()
    second.CopyFrom(state)
    second.replica_id = "another"
    with pytest.raises(ResourceExhausted, match="has a follower"):
        shard.leader.accept(second)


async def test_writers_see_a_full_follower_as_a_full_disk(make_shard):
    """RESOURCE_EXHAUSTED with a hint, from its report until it has caught up; with one required
    copy writers notice nothing."""
    shard = make_shard(2)
    await shard.leader.begin()
    state = shard.other.follower_state()
    state.no_room = "no space left on device"
    link = shard.leader.accept(state)
    with pytest.raises(ResourceExhausted, match="no room: no space left") as refused:
        shard.leader.admit()
    assert refused.value.retry_after_s
    link.end(Unavailable("the follower disconnected"))
    await settle()
    with pytest.raises(ResourceExhausted, match="no room"):
        shard.leader.admit()
    link = shard.leader.accept(shard.other.follower_state())
    async with delivering(link, shard.other):
        await shard.until_joined()
        shard.leader.admit()


def test_unreplicated_data_of_a_follower_is_not_overwritten(make_shard):
    """A follower with data of its own reports it."""
    shard = make_shard(2)
    shard.other.store.write(lambda records: None)
    assert shard.other.follower_state().lineage == ""
    put_groups(shard.other.store, make_group())
    assert shard.other.follower_state().lineage == "unreplicated"


# Going on alone for good


async def test_replica_with_all_writes_may_serve_alone(make_shard):
    """It stays in the set as the only one in sync, and a later follower copies everything; a shard
    without replication needs no record."""
    shard = make_shard(2)
    await shard.leader.begin()
    await serve_alone(shard.etcd, shard.node.store)
    assert await shard.in_sync() == {shard.ids[0]}
    assert catching_up(shard.node, shard.other).way == "copy"
    before = shard.etcd.stored
    await serve_alone(shard.etcd, shard.other.store)
    assert shard.etcd.stored is before


async def test_replica_that_may_lack_writes_may_not_serve_alone(make_shard):
    """Nor one whose shard another replica leads; each refusal gives the way out."""
    shard = make_shard(1)
    await shard.leader.begin()
    shard.other.lead()
    with pytest.raises(ConfigError, match="may lack what another has acknowledged"):
        await serve_alone(shard.etcd, shard.other.store)
    shard.etcd.leader = Versioned(value=b"pool-host-1", mod_revision=9)
    with pytest.raises(Unavailable, match="is led by pool-host-1"):
        await serve_alone(shard.etcd, shard.node.store)
