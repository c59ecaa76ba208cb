"""Two replicas of a shard are equal in the end, after any history."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import msgspec
import pytest

from forge.core.errors import DataLoss, FailedPrecondition, Unavailable
from forge.v1 import common_pb2
from forge.v1 import replica_pb2 as pb
from services.pool.readers import ReaderThreads
from services.pool.replication import follower_link
from services.pool.replication.replica_set import ReplicaSet, may_lead
from services.pool.storage import journal
from services.pool.storage.journal import ReplicaState, keys_changed
from services.pool.storage.tables import Table
from tests.support.pool.records import make_group, make_turn
from tests.support.pool.replicas import LINEAGE, Node, Writes, catching_up, linked, settle_reads
from tests.support.pool.store import append, change, fetch, put_groups, set_states
from tests.support.runtime.waiting import until


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few records to a page, so that much happens between them."""
    monkeypatch.setattr(journal, "PAGE_BYTES", 400)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("seed", range(8))
async def test_replicas_are_equal_after_any_history(node, seed):
    """Lines are cut and processes killed at random points, each replica leads in turn, writes
    continue: no confirmed write is lost, and a replica that caught up is equal byte by byte."""
    draw = Random(seed)
    writes = Writes(draw)
    leader, follower = node("a"), node("b")
    leader.lead()
    confirmed: list[tuple[int, dict[Any, Any]]] = []
    for _ in range(6):
        writes.some(leader, draw.randrange(8))
        async with linked(leader, follower) as link:
            for _ in range(draw.randrange(6)):
                writes.some(leader, draw.randrange(4))
                await settle_reads(link, draw.randrange(10))
            in_sync = draw.random() < 0.7
            if in_sync:
                await link.reached(leader.state().position)
                confirmed = [(leader.state().position, leader.dump())]
                assert follower.dump() == confirmed[0][1]
                # Some commits that perhaps nobody but the leader has when the line is cut.
                writes.some(leader, draw.randrange(5))
                await settle_reads(link, draw.randrange(3))
        for one in (leader, follower):
            if draw.random() < 0.5:
                one.crash()
        # Only one that was brought up to date may lead next.
        if in_sync and draw.random() < 0.7:
            leader, follower = follower, leader
            leader.lead(term=follower.term + 1)
    async with linked(leader, follower) as link:
        await link.reached(leader.state().position)
        assert follower.dump() == leader.dump()
        assert follower.state().position == leader.state().position


async def test_catch_up_after_a_short_absence_sends_changed_records(node):
    """Keys come from the journal, not from a whole copy, and commits of the deposed leader alone
    are overwritten."""
    a, b = node("a"), node("b")
    a.lead()
    for index in range(50):
        put_groups(a.store, make_group(f"t{index}", index))
    async with linked(a, b) as link:
        await link.reached(a.state().position)
    append(a.store, make_turn("t0:0:0", messages_json="of the deposed"))
    b.lead()
    append(b.store, make_turn("t0:0:0", messages_json="of the new leader"))
    a.crash()
    catch_up = catching_up(b, a)
    assert catch_up.way == "journal"
    page = b.store.read(partial(catch_up.page, sent=0))
    assert len(page.copy.changes) < 10
    async with linked(b, a) as link:
        await link.reached(b.state().position)
    assert fetch(a.store, "t0:0:0").turns[0].messages_json == "of the new leader"
    assert a.dump() == b.dump()


async def test_follower_absent_longer_than_the_journal_copies_everything(node, monkeypatch):
    """The journal is bounded."""
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 500)
    a, b = node("a"), node("b")
    a.lead()
    async with linked(a, b) as link:
        await link.reached(a.state().position)
    for index in range(50):
        put_groups(a.store, make_group(f"t{index}", index))
    assert a.state().journal_bytes <= 500
    assert catching_up(a, b).way == "copy"
    with pytest.raises(FailedPrecondition, match="no longer has commit"):
        a.store.read(lambda records: keys_changed(records, after=1, up_to=50))
    async with linked(a, b) as link:
        await link.reached(a.state().position)
    assert a.dump() == b.dump()


async def test_replica_with_an_incomplete_copy_may_not_lead(node, small_pages):
    """Until it has caught up its disk says so, also after a crash."""
    a, b = node("a"), node("b")
    a.lead()
    for index in range(100):
        put_groups(a.store, make_group(f"t{index}", index))
    async with linked(a, b):
        await until(lambda: b.state().copying)
    b.crash()
    assert b.state().copying
    assert not may_lead(members(b.state().replica_id), b.state())
    async with linked(a, b) as link:
        await link.reached(a.state().position)
    assert may_lead(members(b.state().replica_id), b.state())


def cut_copy(a: Node, b: Node) -> None:
    """A quarter of 40 groups has come to `b` when the line is cut, and `a` goes on."""
    a.lead()
    for index in range(40):
        put_groups(a.store, make_group(f"t{index:02}", index))
    copy = catching_up(a, b)
    b.take(copy.begin(LINEAGE))
    while len(b.dump()[Table.GROUPS]) < 10:
        page = a.store.read(partial(copy.page, sent=a.state().position))
        assert page is not None
        b.take(page)
    b.crash()
    assert b.state().copying
    # In the part that was copied, and behind it.
    for task_id in ("t00", "t30"):
        set_states(a.store, change(task_id, common_pb2.GROUP_STATE_TRAINED, step=1))
    put_groups(a.store, make_group("t000", 40), make_group("t99", 41))


async def test_interrupted_copy_is_continued(node, small_pages):
    """Copied records are not sent again unless they changed; also after several interruptions."""
    a, b = node("a"), node("b")
    cut_copy(a, b)
    rest = catching_up(a, b)
    assert rest.way == "rest"
    b.take(rest.begin(LINEAGE))
    sent: list[str] = []
    for _ in range(4):
        page = a.store.read(partial(rest.page, sent=a.state().position))
        sent += [
            each.record.key.decode() for each in page.copy.changes if each.record.table == "groups"
        ]
        b.take(page)
    assert "t000" in sent
    assert "t05" not in sent
    b.crash()
    assert catching_up(a, b).way == "rest"
    async with linked(a, b) as link:
        put_groups(a.store, make_group("t001", 42))
        await link.reached(a.state().position)
    assert b.dump() == a.dump()
    assert b.state().position == a.state().position
    assert not b.state().copied


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("seed", range(6))
async def test_copy_with_random_interruptions_is_equal_in_the_end(node, seed):
    """The line is cut between any two pages while writes and deletions continue."""
    draw = Random(seed)
    writes = Writes(draw)
    a, b = node("a"), node("b")
    a.lead()
    writes.some(a, 150)
    ways = []
    for _ in range(6):
        ways.append(catching_up(a, b).way)
        async with linked(a, b, most_steps=draw.randrange(2, 9)) as link:
            writes.some(a, draw.randrange(6))
            await settle_reads(link, draw.randrange(4))
            writes.some(a, draw.randrange(6))
            with suppress(Unavailable):
                await link.reached(a.state().position + 1)
        if draw.random() < 0.3:
            b.crash()
    assert set(ways[1:]) == {"rest"}
    async with linked(a, b) as link:
        writes.some(a, 5)
        await link.reached(a.state().position)
        assert b.dump() == a.dump()


@pytest.mark.parametrize("why", ["another term", "a short journal", "another lineage"])
async def test_copy_restarts_if_the_journal_may_be_incomplete(node, small_pages, monkeypatch, why):
    """Only the leadership that began it knows everything that it sent."""
    a, b = node("a"), node("b")
    if why == "a short journal":
        monkeypatch.setattr(journal, "JOURNAL_BYTES", 10)
    cut_copy(a, b)
    if why == "another term":
        a.lead(term=a.term + 1)
    if why == "another lineage":
        a.store.write(partial(journal.adopt, lineage="other", term=2))
    assert catching_up(a, b).way == "copy"


@pytest.mark.parametrize("next_leader", ["the same", "one that lacks what was sent"])
async def test_interrupted_catch_up_by_journal_continues_by_journal(node, small_pages, next_leader):
    """Without a whole copy: received records are requested again, so that a leader without them, as
    they were never acknowledged, overwrites them."""
    a, b, c = node("a"), node("b"), node("c")
    a.lead()
    put_groups(a.store, *(make_group(f"t{index}", index) for index in range(20)))
    for follower in (c, b):
        async with linked(a, follower) as link:
            await link.reached(a.state().position)
    for index in range(20, 40):
        put_groups(a.store, make_group(f"t{index}", index))
    catch_up = catching_up(a, b)
    b.take(pb.FollowStep(begin=pb.FollowBegin(lineage=LINEAGE)))
    for _ in range(3):
        b.take(a.store.read(partial(catch_up.page, sent=0)))
    taken = len(b.dump()[Table.GROUPS])
    assert 20 < taken < 40
    b.crash()
    assert b.state().copying
    assert not may_lead(members(b.state().replica_id), b.state())
    leader = a
    if next_leader != "the same":
        leader = c
        leader.lead()
        put_groups(leader.store, make_group("other", 40))
    assert catching_up(leader, b).way == "journal"
    async with linked(leader, b) as link:
        await link.reached(leader.state().position)
    assert b.dump() == leader.dump()
    assert b.state().position == leader.state().position
    assert may_lead(members(b.state().replica_id), b.state())


async def test_catch_up_ends_after_the_commits_that_its_pages_show(node):
    """A page may be read before its commit is sent; the follower waits for that commit."""
    a, b = node("a"), node("b")
    a.lead()
    held = []
    a.store.count_commits(lambda position, changes: held.append((position, changes)))
    async with linked(a, b) as link:
        put_groups(a.store, make_group())
        await until(lambda: b.dump()[Table.GROUPS])
        await settle_reads(link)
        assert b.state().copying
        link.add(*held[0])
        await link.reached(a.state().position)
    assert a.dump() == b.dump()


@pytest.mark.parametrize("how", ["the directory's identity", "the schema version"])
async def test_replica_outside_the_journal_copies_everything(node, how):
    """A restored copy of the files is another replica, and a migration is in no journal."""
    a, b = node("a"), node("b")
    a.lead()
    async with linked(a, b) as link:
        await link.reached(a.state().position)
    before = b.state()
    if how == "the schema version":
        old = msgspec.structs.replace(before, schema_version=0)
        b.store.write(lambda records: journal._keep(records, old))
    else:
        (b.directory / "replica").unlink()
    b.crash()
    assert catching_up(a, b).way == "copy"
    assert (b.state().replica_id == before.replica_id) == (how == "the schema version")


def test_damaged_or_missing_commit_is_refused(node):
    """A wrong checksum or a gap in the positions changes nothing."""
    a = node("a")
    a.take(pb.FollowStep(begin=pb.FollowBegin(lineage=LINEAGE, from_scratch=True)))
    assert a.take(pb.FollowStep(caught_up_position=7)) == 7
    before = a.dump()
    record = pb.RecordKey(table="turns", key=b"t")
    for commit in (
        pb.RecordChanges(position=8, changes=[pb.RecordChange(record=record, value=b"damaged")]),
        pb.RecordChanges(position=9, changes=[pb.RecordChange(record=record)]),
        pb.RecordChanges(
            position=8,
            changes=[pb.RecordChange(record=pb.RecordKey(table="journal", key=b"k"))],
        ),
    ):
        with pytest.raises(DataLoss):
            a.take(pb.FollowStep(commit=commit))
    assert (a.dump(), a.state().position) == (before, 7)


async def test_silent_follower_is_disconnected(node):
    """One that receives everything and confirms nothing."""
    a, b = node("a"), node("b")
    a.lead()
    link = follower_link.Link(
        a.store,
        ReaderThreads(1),
        b.follower_state(),
        lineage=LINEAGE,
        term=a.term,
        position=a.state().position,
        timeout_s=0.01,
        on_confirmed=lambda position: None,
    )

    async def silence():
        await asyncio.Event().wait()
        yield pb.FollowRequest()

    async def take() -> None:
        async for _ in link.responses(silence()):
            pass

    taking = asyncio.create_task(take())
    assert "confirmed nothing" in str(await link.ended)
    taking.cancel()
    await asyncio.wait({taking})


# Who may lead


def members(*in_sync: str) -> ReplicaSet:
    return ReplicaSet(shard="s0", lineage=LINEAGE, in_sync=frozenset(in_sync), fence=1)


@pytest.mark.parametrize(
    ("record", "state", "may"),
    [
        (None, ReplicaState(replica_id="a"), True),
        (None, ReplicaState(replica_id="a", lineage=LINEAGE), False),
        (members("a", "b"), ReplicaState(replica_id="a", lineage=LINEAGE), True),
        (members("a"), ReplicaState(replica_id="a"), True),
        (members("b"), ReplicaState(replica_id="a", lineage=LINEAGE), False),
        (members("a"), ReplicaState(replica_id="a", lineage="other"), False),
        (members("a"), ReplicaState(replica_id="a", lineage=LINEAGE, copying=True), False),
    ],
)
def test_only_a_replica_with_every_acknowledged_write_may_lead(record, state, may):
    """By the record in etcd and by its own disk; without a record only one that never followed."""
    assert may_lead(record, state) is may
