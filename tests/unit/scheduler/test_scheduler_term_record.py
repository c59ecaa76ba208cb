"""The term record: its fields, and the fences of its writers."""

from __future__ import annotations

import json

import pytest

from forge.core.errors import StaleFence, Unavailable
from forge.core.queue.activity import Activity
from forge.runtime.coordination import Coordinator, Versioned
from services.scheduler.term_record import TERM_KEY, Move, OwnRecord, TermRecord


class OneKey(Coordinator):
    """etcd, as far as the record needs it; `between` happens once, before the next write."""

    def __init__(self) -> None:
        self.value = b""
        self.revision = 0
        self.between: bytes | None = None

    async def get(self, key: str) -> Versioned | None:
        assert key == TERM_KEY
        if not self.revision:
            return None
        return Versioned(value=self.value, mod_revision=self.revision)

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        if self.between is not None:
            self.value, self.between = self.between, None
            self.revision += 1
        if expected_revision != self.revision:
            raise StaleFence(f"{key} is no longer at revision {expected_revision}")
        self.value = value
        self.revision += 1
        return self.revision


async def test_term_record_is_read_back() -> None:
    """Every field, and the revision of the next change."""
    etcd = OneKey()
    assert await TermRecord.read(etcd) == TermRecord()
    written = await TermRecord(
        term=3,
        shards=frozenset({"s0", "s1"}),
        claims=True,
        activity=Activity.PAUSED,
        void_before=(2, 7),
        retiring=frozenset({"s1"}),
        move=Move(source="s1", target="s0", task_ids=("a", "b")),
        losing={"s2": {"train/trained": 3}},
        lost={"eval/evaluated": 1},
    ).write(etcd)
    assert written.revision == 1
    assert await TermRecord.read(etcd) == written


async def test_term_record_of_an_earlier_release_is_read() -> None:
    """Missing fields have their defaults: not paused, no void batches."""
    etcd = OneKey()
    etcd.value, etcd.revision = b'{"term": 1, "shards": ["s0"], "claims": false}', 5
    record = await TermRecord.read(etcd)
    assert (record.activity, record.void_before) == (Activity.RUNNING, (0, 0))


async def test_changes_of_one_leader_do_not_undo_each_other() -> None:
    """Another change is written in between: this one is applied on top of it."""
    etcd = OneKey()
    record = await TermRecord(term=1, shards=frozenset({"s0"})).write(etcd)
    etcd.between = json.dumps({"term": 1, "shards": ["s0", "s1"], "claims": False}).encode()
    amended = await OwnRecord(etcd, 1).amend(void_before=(1, 4))
    assert (amended.shards, amended.void_before) == (frozenset({"s0", "s1"}), (1, 4))
    assert amended.revision == record.revision + 2


async def test_deposed_leader_changes_no_term_record() -> None:
    """Another term has begun, before or during the write."""
    etcd = OneKey()
    await TermRecord(term=1).write(etcd)
    etcd.between = json.dumps({"term": 2, "shards": [], "claims": True}).encode()
    with pytest.raises(Unavailable, match="term 1 is over: term 2 has begun"):
        await OwnRecord(etcd, 1).amend(activity=Activity.PAUSED)
    assert (await TermRecord.read(etcd)).activity is Activity.RUNNING


async def test_former_trainer_is_refused() -> None:
    """The highest fence of a trainer is recorded: a lower one may not rewind."""
    etcd = OneKey()
    await TermRecord(term=1).write(etcd)
    record = OwnRecord(etcd, 1)
    await record.raise_trainer_fence(7)
    await record.raise_trainer_fence(7)
    with pytest.raises(StaleFence, match="fence 5 of this trainer is below 7"):
        await record.raise_trainer_fence(5)
    assert (await TermRecord.read(etcd)).trainer_fence == 7


async def test_record_without_lost_shards_keeps_their_counts() -> None:
    """They are summed once; the move of a gone shard is over, any other stays."""
    move = Move(source="s1", target="s0", task_ids=("a",))
    record = TermRecord(
        shards=frozenset({"s0", "s1", "s2"}),
        retiring=frozenset({"s1"}),
        move=move,
        losing={"s1": {"train/trained": 2}, "s2": {"train/trained": 3, "train/tombstoned": 1}},
        lost={"train/trained": 4},
    )
    without = record.without({"s2"})
    assert without.shards == {"s0", "s1"} and without.move == move
    assert without.lost == {"train/trained": 7, "train/tombstoned": 1}
    assert without.losing == {"s1": {"train/trained": 2}}
    assert without.without({"s2"}) == without
    assert without.without({"s1"}).move is None
    assert without.without({"s1"}).retiring == frozenset()


async def test_shards_are_removed_only_in_the_own_term() -> None:
    """A deposed leader changes nothing."""
    etcd = OneKey()
    await TermRecord(term=1, shards=frozenset({"s0", "s1"})).write(etcd)
    with pytest.raises(Unavailable, match="term 0 is over"):
        await OwnRecord(etcd, 0).remove_shards({"s1"})
    await OwnRecord(etcd, 1).remove_shards({"s1"})
    assert (await TermRecord.read(etcd)).shards == {"s0"}
