"""What of a replica is replaced by the records of the other one, while both are served."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from forge.core.errors import DataLoss, FailedPrecondition, InvalidArgument, Unavailable
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from forge.v1 import replica_pb2 as pb
from services.pool.data.commands import RepairUnit
from services.pool.data.repair.record_repair import is_whole
from services.pool.replication.self_repair import damaged_units
from services.pool.storage.journal import caught_up_message, commit_message
from services.pool.storage.keys import group_key, queue_key, reward_key, trajectory_key, turn_key
from services.pool.storage.record_copies import answer, copied_records, units_of
from services.pool.storage.records import DamagedRecord, Records
from services.pool.storage.tables import Key, Table
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.replicas import LINEAGE, SHARD, Node
from tests.support.pool.store import append, change, commit, put_groups, reward, seal, set_states

KEY = trajectory_key(parse_trajectory_id("a:0:0"))
OPEN = trajectory_key(parse_trajectory_id("b:0:0"))
FLIPPED = b"\0\0\0\0flipped"

MakeNode = Callable[[str], Node]


@pytest.fixture
def pair(node: MakeNode) -> tuple[Node, Node]:
    """A leader, and a follower that has all of it."""
    leader, follower = node("leader"), node("follower")
    leader.lead()
    put_groups(leader.store, make_group("a"), make_group("b", 1))
    append(leader.store, *(make_turn("a:0:0", index) for index in range(2)), make_turn("b:0:0"))
    seal(leader.store, "a:0:0", turns=2, rewards=[make_reward("first")])
    set_states(leader.store, change("a", common_pb2.GROUP_STATE_TRAINED, step=3))
    catch_up(leader, follower)
    return leader, follower


def catch_up(leader: Node, follower: Node) -> None:
    values = {
        (table, key): value for table, entries in leader.dump().items() for key, value in entries
    }
    lineage = leader.store.lineage()
    state = leader.state()
    commits = pb.FollowStep.FromString(commit_message(state.position, values))
    begin = pb.FollowStep(begin=pb.FollowBegin(lineage=LINEAGE, from_scratch=True))
    end = pb.FollowStep.FromString(caught_up_message(state.position, state.terms))
    follower.take(begin, pb.FollowStep(copy=commits.commit), end)
    assert follower.store.lineage() == lineage


def flip(node: Node, *records: Key) -> None:
    def damage(stored: Records) -> None:
        for table, key in records:
            stored.put_checksummed(table, key, FLIPPED)

    node.store.write(damage)


def lose(node: Node, record: Key) -> None:
    node.store.write(lambda records: records.put_checksummed(*record, None))


def mend(damaged: Node, other: Node, record: Key, *, leads: bool = True) -> bool:
    """As a replica repairs itself once it met `record`."""
    since = damaged.state().position
    whole = True
    for unit in units_of(*record):
        copy = other.store.read(partial(copied_records, units=[unit]))
        command = RepairUnit(unit=unit, copy=copy, since=since, leads=leads)
        whole = commit(damaged.store, command) and whole
    return whole


RECORDS = [
    (Table.TURNS, turn_key(KEY, 0)),
    (Table.TURNS, turn_key(OPEN, 0)),
    (Table.TRAJECTORIES, KEY),
    (Table.TRAJECTORIES, OPEN),
    (Table.REWARDS, reward_key(KEY, "first")),
    (Table.GROUPS, group_key("a")),
    (Table.STATES, group_key("a")),
    (Table.QUEUE, queue_key(common_pb2.PURPOSE_TRAIN, 1, "b")),
    (Table.META, b"change_log"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record[0].value)
@pytest.mark.parametrize("leads", [True, False])
def test_damaged_record_is_replaced_from_the_other_replica(pair, record, leads):
    """On a leader and on a follower; both then have the same records, and no other record
    changed."""
    damaged, other = pair if leads else reversed(pair)
    before = other.dump()
    flip(damaged, record)
    assert mend(damaged, other, record, leads=leads)
    assert damaged.dump() == other.dump() == before


@pytest.mark.parametrize("table", [Table.CHANGES, Table.SETTLED])
def test_damaged_index_entry_is_restored(pair, table):
    """Also of the change log and the index of settled groups, as the other replica has every
    commit."""
    leader, follower = pair
    ((key, _), *_) = leader.dump()[table]
    flip(leader, (table, key))
    assert mend(leader, follower, (table, key))
    assert leader.dump() == follower.dump()


def test_repair_of_a_leader_is_a_commit_and_of_a_follower_is_none(pair):
    """The leader's is sent to the follower; the follower's must not change its position."""
    leader, follower = pair
    positions = leader.state().position, follower.state().position
    for node, other, leads in ((leader, follower, True), (follower, leader, False)):
        flip(node, RECORDS[0])
        assert mend(node, other, RECORDS[0], leads=leads)
    assert leader.state().position == positions[0] + 1
    assert follower.state().position == positions[1]


def test_lost_turn_of_a_closed_trajectory_is_restored(pair):
    """The digests of the seal show the loss, no checksum does."""
    leader, follower = pair
    lose(leader, RECORDS[0])
    with pytest.raises(DamagedRecord, match="a:0:0 lacks 1 of its 2 turns: 0") as met:
        leader.store.trajectories([parse_trajectory_id("a:0:0")])
    assert mend(leader, follower, (met.value.table, met.value.key))
    assert leader.dump() == follower.dump()


def test_verified_record_is_never_overwritten(pair):
    """A reward and a state newer than the copy stay as they are."""
    leader, follower = pair
    reward(leader.store, make_reward("late"), trajectory_id="a:0:0")
    set_states(leader.store, change("b", common_pb2.GROUP_STATE_TRAINED, step=4))
    before = leader.dump()
    for unit in ((Table.TRAJECTORIES, KEY), (Table.GROUPS, group_key("b"))):
        copy = follower.store.read(partial(copied_records, units=[unit]))
        assert commit(leader.store, RepairUnit(unit=unit, copy=copy, since=1, leads=True))
    assert leader.dump() == before


def test_copy_without_every_commit_is_refused(pair):
    """It may have an older value under the same key."""
    leader, follower = pair
    set_states(leader.store, change("b", common_pb2.GROUP_STATE_TRAINED, step=4))
    flip(leader, (Table.STATES, group_key("b")))
    assert not mend(leader, follower, (Table.STATES, group_key("b")))
    with pytest.raises(DataLoss, match="record b'b' in group_states does not match"):
        leader.store.read(lambda records: records.get(Table.STATES, group_key("b")))


@pytest.mark.parametrize("record", RECORDS[:-2], ids=lambda record: record[0].value)
def test_record_damaged_on_both_replicas_stays_damaged(pair, record):
    """It is neither replaced nor deleted, and every read names it."""
    leader, follower = pair
    flip(leader, record)
    flip(follower, record)
    assert not mend(leader, follower, record)
    with pytest.raises(DataLoss, match=f"in {record[0].value} does not match"):
        leader.store.read(lambda records: records.get(*record))


def test_queue_entry_lost_on_both_replicas_is_rebuilt(pair):
    """The group's record has its place."""
    leader, follower = pair
    place = RECORDS[-2]
    lose(leader, place)
    lose(follower, place)
    assert not leader.store.read(partial(is_whole, unit=(Table.GROUPS, group_key("b"))))
    assert mend(leader, follower, (Table.GROUPS, group_key("b")))
    assert leader.store.read(lambda records: records.get(*place)) == b""


def test_repair_pass_finds_every_damaged_unit_once(pair):
    """By checksum and by digest, for any number of damaged records in a unit."""
    leader, _ = pair
    flip(leader, RECORDS[0], RECORDS[4], RECORDS[5], RECORDS[6])
    lose(leader, RECORDS[-2])
    found = {
        unit
        for table in (Table.TRAJECTORIES, Table.GROUPS, Table.STATES, Table.QUEUE)
        for unit in leader.store.read(partial(damaged_units, table=table, after=b""))[0]
    }
    assert found == {
        (Table.TRAJECTORIES, KEY),
        (Table.GROUPS, group_key("a")),
        (Table.GROUPS, group_key("b")),
    }


def test_replica_in_catch_up_neither_sends_nor_repairs_records(pair):
    """Its records belong to no single moment."""
    leader, follower = pair
    follower.take(pb.FollowStep(begin=pb.FollowBegin(lineage=LINEAGE)))
    flip(follower, RECORDS[0])
    look = partial(damaged_units, table=Table.TRAJECTORIES, after=b"")
    assert follower.store.read(look) == ([], b"")
    assert not mend(follower, leader, RECORDS[0], leads=False)
    with pytest.raises(Unavailable, match="is catching up"):
        follower.store.read(partial(copied_records, units=[(Table.TRAJECTORIES, KEY)]))


def request(store_lineage: str, **fields: Any) -> pb.FetchRecordsRequest:
    given = {"pool_shard": SHARD, "lineage": store_lineage, "records": []} | fields
    return pb.FetchRecordsRequest(**given)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"pool_shard": "s9"}, InvalidArgument, "pool_shard 's9' is not here"),
        ({"lineage": "other"}, FailedPrecondition, "the caller's of 'other'"),
        ({"lineage": ""}, FailedPrecondition, "the caller's of ''"),
        (
            {"records": [pb.RecordKey(table="journal", key=b"x")]},
            InvalidArgument,
            "'journal' is not a table that replicas share",
        ),
    ],
)
def test_records_are_sent_to_no_other_shard(pair, fields, error, message):
    """Nor are records of one replica alone."""
    leader, _ = pair
    with pytest.raises(error, match=message):
        leader.store.read(partial(answer, request=request(leader.store.lineage(), **fields)))
