"""A leader's office: who is accepted, what is recorded when, and what is told to whom."""

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
from forge.runtime.coordination import Versioned
from services.pool.config import PoolConfig, ReplicationSettings
from services.pool.readers import Readers
from services.pool.replication.election import serve_alone
from services.pool.replication.leader import Leader
from services.pool.replication.replica_set import ReplicaSet
from tests.support.pool.records import make_group
from tests.support.pool.replicas import LINEAGE, SHARD, Node, catching_up, delivering
from tests.support.pool.store import put_groups
from tests.support.runtime.waiting import settle, until

FENCE = 7


@dataclass
class Etcd:
    """Stands in for the coordinator: the record and the leader's key, which may be out of reach."""

    stored: Versioned | None = None
    leader: Versioned | None = None
    down: bool = False
    asked_in_vain: int = 0
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

    async def campaign(self, name: str, instance_id: str, *, ttl_s: float) -> Lease:
        return Lease()

    def _check(self) -> None:
        if self.down:
            self.asked_in_vain += 1
            raise Unavailable("etcd does not answer")


class Lease:
    """Stands in for a leadership that holds, or is over."""

    fence = FENCE
    alive = True

    def __init__(self, *, expired: bool = False) -> None:
        self._expired = expired

    async def lost(self) -> None:
        if not self._expired:
            await asyncio.Event().wait()


@dataclass
class Office:
    """A leader with its store, its etcd, and a follower that may join."""

    leader: Leader
    node: Node
    other: Node
    etcd: Etcd

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
async def make_office(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[int], Office]]:
    """An office with that many copies wanted; it has not begun."""
    monkeypatch.setattr("services.pool.replication.leader.RETRY_S", 0.001)
    readers = Readers(1)
    made: list[Office] = []

    def make(min_copies: int) -> Office:
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
        leader = Leader(
            PoolConfig(replication=ReplicationSettings(min_copies=min_copies)),
            etcd,
            Lease(),
            members,
            node.store,
            readers,
            state=state,
            on_members=lambda: None,
        )
        node.store.count_commits(leader.committed)
        made.append(Office(leader, node, other, etcd))
        return made[-1]

    yield make
    for office in made:
        await office.leader.close()
        office.node.store.close()
        office.other.store.close()
    await readers.close()


async def test_nobody_goes_alone_before_the_record_says_so(make_office):
    """With etcd out of reach a lone leader takes nothing, although one copy would do."""
    office = make_office(1)
    office.etcd.down = True
    with pytest.raises(Unavailable):
        await office.leader.begin()
    with pytest.raises(Unavailable, match="is not accepting writes"):
        office.leader.gate.admit()
    office.etcd.down = False
    await office.leader.begin()
    assert await office.in_sync() == {office.ids[0]}
    office.leader.gate.admit()


async def test_who_is_elected_anew_while_etcd_is_away_asks_now_and_then(make_office, monkeypatch):
    """Not as fast as it is refused."""
    office = make_office(1)
    await office.leader.begin()
    office.leader.leadership = Lease(expired=True)
    office.etcd.down = True
    monkeypatch.setattr("services.pool.replication.leader.RETRY_S", 60.0)
    holding = asyncio.create_task(office.leader.hold())
    await until(lambda: office.etcd.asked_in_vain)
    await settle()
    assert office.etcd.asked_in_vain == 1
    holding.cancel()
    await asyncio.wait({holding})


async def test_two_copies_wanted_means_that_a_lone_leader_takes_nothing(make_office):
    """The record stays: who was in sync has all that was acknowledged."""
    office = make_office(2)
    await office.leader.begin()
    assert await office.in_sync() == set(office.ids)
    with pytest.raises(Unavailable, match="min_copies is 2"):
        office.leader.gate.admit()


async def test_a_follower_has_everything_before_it_is_recorded(make_office):
    """From the moment in which it is named in the record it may be elected."""
    office = make_office(1)
    await office.leader.begin()
    office.write("alone")
    seen = []
    office.etcd.before_write = lambda: seen.append(
        office.other.state().position >= office.leader.gate.position
    )
    link = office.leader.accept(office.other.follower_state())
    office.write("while-it-joins")
    async with delivering(link, office.other):
        await office.until_joined()
        assert seen == [True]
        assert office.leader.gate.required


@pytest.mark.parametrize("min_copies", [1, 2])
async def test_a_lost_follower_is_recorded_before_anything_is_told(make_office, min_copies):
    """What waits for it is told once the leader is recorded as alone, or, where two copies are
    wanted, refused."""
    office = make_office(min_copies)
    await office.leader.begin()
    link = office.leader.accept(office.other.follower_state())
    async with delivering(link, office.other):
        await office.until_joined()
        office.etcd.down = True
    office.write("unconfirmed")
    waiting = asyncio.create_task(office.leader.gate.passed(timeout_s=60.0))
    if min_copies == 1:
        await until(lambda: office.etcd.asked_in_vain)
        assert not waiting.done()
        office.etcd.down = False
        await waiting
        assert await office.in_sync() == {office.ids[0]}
    else:
        with pytest.raises(Unavailable, match="its follower is not connected"):
            await waiting


async def test_a_deposed_leader_finds_the_record_changed(make_office):
    """Another has written it under its own fence: what waits is refused, and the office ends."""
    office = make_office(1)
    await office.leader.begin()
    link = office.leader.accept(office.other.follower_state())
    async with delivering(link, office.other):
        await office.until_joined()
        found = await ReplicaSet.read(office.etcd, SHARD)
        assert found is not None
        successor = ReplicaSet(
            shard=SHARD,
            lineage=LINEAGE,
            in_sync=found.in_sync,
            fence=FENCE + 1,
            revision=found.revision,
        )
        await successor.write(office.etcd)
    office.write("unconfirmed")
    with pytest.raises(Unavailable):
        await office.leader.gate.passed(timeout_s=60.0)
    await office.leader.hold()
    with pytest.raises(Unavailable, match="is no longer the leader"):
        office.leader.gate.admit()
    assert (await ReplicaSet.read(office.etcd, SHARD)).fence == FENCE + 1


async def test_a_write_of_unknown_outcome_that_took_is_our_own(make_office):
    """The record at a later revision than expected deposes nobody if it is under our fence."""
    office = make_office(1)
    ours = ReplicaSet(
        shard=SHARD, lineage=LINEAGE, in_sync=office.leader.members.in_sync, fence=FENCE
    )
    await ours.write(office.etcd)
    await office.leader.begin()
    assert await office.in_sync() == {office.ids[0]}
    assert not office.leader.deposed.is_set()


async def test_who_may_follow(make_office):
    """Another shard, foreign data, another schema, a replica that has led since and a second
    follower are refused by name."""
    office = make_office(2)
    await office.leader.begin()
    state = office.other.follower_state()
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
            office.leader.accept(wrong)
    office.leader.accept(state)
    second = type(state)()
    second.CopyFrom(state)
    second.replica_id = "another"
    with pytest.raises(ResourceExhausted, match="has a follower"):
        office.leader.accept(second)


async def test_a_follower_without_room_is_a_full_disk_to_who_writes(make_office):
    """RESOURCE_EXHAUSTED with a hint, from when it says so until it has caught up; where one copy
    will do, nobody is told anything."""
    office = make_office(2)
    await office.leader.begin()
    state = office.other.follower_state()
    state.no_room = "no space left on device"
    link = office.leader.accept(state)
    with pytest.raises(ResourceExhausted, match="no room: no space left") as refused:
        office.leader.admit()
    assert refused.value.retry_after_s
    link.end(Unavailable("the follower hung up"))
    await settle()
    with pytest.raises(ResourceExhausted, match="no room"):
        office.leader.admit()
    link = office.leader.accept(office.other.follower_state())
    async with delivering(link, office.other):
        await office.until_joined()
        office.leader.admit()


def test_data_that_was_never_replicated_is_not_taken_for_empty(make_office):
    """A follower that holds something of its own says so, and is not overwritten."""
    office = make_office(2)
    office.other.store.write(lambda records: None)
    assert office.other.follower_state().lineage == ""
    put_groups(office.other.store, make_group())
    assert office.other.follower_state().lineage == "unreplicated"


# Going on alone for good


async def test_a_shard_that_was_replicated_is_served_alone_by_who_has_all(make_office):
    """It leaves the set as the only one in sync, and whoever follows it later copies everything; a
    shard that was never replicated asks nobody."""
    office = make_office(2)
    await office.leader.begin()
    await serve_alone(office.etcd, office.node.store)
    assert await office.in_sync() == {office.ids[0]}
    assert catching_up(office.node, office.other).way == "copy"
    before = office.etcd.stored
    await serve_alone(office.etcd, office.other.store)
    assert office.etcd.stored is before


async def test_nobody_serves_alone_what_another_leads_or_may_have_more_of(make_office):
    """Each is refused with the way out."""
    office = make_office(1)
    await office.leader.begin()
    office.other.lead()
    with pytest.raises(ConfigError, match="may lack what another has acknowledged"):
        await serve_alone(office.etcd, office.other.store)
    office.etcd.leader = Versioned(value=b"pool-host-1", mod_revision=9)
    with pytest.raises(Unavailable, match="is led by pool-host-1"):
        await serve_alone(office.etcd, office.node.store)
