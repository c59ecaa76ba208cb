"""When a replica tries to repair itself again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

import pytest_asyncio

from forge.core.errors import ForgeError, Unavailable
from forge.core.trajectory import parse_trajectory_id
from services.pool.data.repair.index_mending import MENDED
from services.pool.readers import ReaderThreads
from services.pool.replication import self_repair
from services.pool.replication.self_repair import SelfRepair
from services.pool.storage.keys import trajectory_key, turn_key
from services.pool.storage.record_copies import CopiedRecords, copied_records
from services.pool.storage.records import DamagedRecord, Records
from services.pool.storage.tables import Key, Table
from tests.support.pool.records import make_group, make_turn
from tests.support.pool.replicas import Node
from tests.support.pool.store import Writer, append, damage_of, put_groups

KEY = turn_key(trajectory_key(parse_trajectory_id("a:0:0")), 0)
MET = DamagedRecord("met", table=Table.TURNS, key=KEY)


@dataclass
class Other:
    """The other replica."""

    copy: CopiedRecords
    error: ForgeError | None = None
    asked: list[Key] = field(default_factory=list)

    async def fetch(self, unit: Key, since: int) -> CopiedRecords:
        self.asked.append(unit)
        if self.error is not None:
            raise self.error
        return self.copy


@pytest_asyncio.fixture
async def damaged(node: Callable[[str], Node]) -> AsyncIterator[tuple[SelfRepair, Other]]:
    """A leader with a damaged turn, and the other replica that has it."""
    leader = node("leader")
    leader.lead()
    put_groups(leader.store, make_group("a"))
    append(leader.store, make_turn("a:0:0"))
    unit = (Table.TRAJECTORIES, KEY[:-4])
    other = Other(leader.store.read(partial(copied_records, units=[unit])))
    leader.store.write(lambda records: records.put_checksummed(Table.TURNS, KEY, b"flipped"))
    readers = ReaderThreads(1)
    yield SelfRepair(leader.store, Writer(leader.store), readers, other.fetch, leads=True), other
    await readers.close()


async def test_repair_is_retried_once_the_other_replica_is_reachable(damaged):
    """Its copy is unknown before."""
    repair, other = damaged
    other.error = Unavailable("no follower in sync")
    assert not await repair.repaired(MET)
    other.error = None
    assert await repair.repaired(MET)
    assert len(other.asked) == 2


async def test_record_without_a_copy_is_not_fetched_at_each_read(damaged, monkeypatch):
    """Only after a pause: an operator may have repaired the other replica."""
    repair, other = damaged
    whole, other.copy = other.copy, CopiedRecords(values={}, position=other.copy.position)
    assert not await repair.repaired(MET)
    other.copy = whole
    assert not await repair.repaired(MET)
    assert len(other.asked) == 1
    monkeypatch.setattr(self_repair, "LEFT_S", 0.0)
    assert await repair.repaired(MET)


async def test_repaired_record_is_not_fetched_again(damaged):
    """Several reads may meet one damage: the first repairs it."""
    repair, other = damaged
    assert await repair.repaired(MET)
    assert await repair.repaired(MET)
    assert len(other.asked) == 1


async def test_record_of_one_replica_alone_is_not_fetched(damaged):
    """No other replica has its journal or its state."""
    repair, other = damaged
    met = DamagedRecord("met", table=Table.REPLICA, key=b"state")
    assert not await repair.repaired(met)
    assert not other.asked


async def test_leader_mends_indexes_in_its_pass(node: Callable[[str], Node]) -> None:
    """An entry with a flipped bit in its key is in no copy under that key: the records of groups
    decide, and the other replica is not asked."""
    leader = node("leader")
    leader.lead()
    group = make_group("a")
    group.task.tag = "before"
    put_groups(leader.store, group)

    def flip(records: Records) -> None:
        for table in MENDED:
            key = next(key for key, _ in records.scan_checksummed(table))
            value = records.get_checksummed(table, key)
            records.put_checksummed(table, key, None)
            records.put_checksummed(table, bytes([key[0] ^ 1]) + key[1:], value)

    leader.store.write(flip)
    assert len(damage_of(leader.store)) >= 4
    other = Other(CopiedRecords(values={}, position=0))
    readers = ReaderThreads(1)
    repair = SelfRepair(leader.store, Writer(leader.store), readers, other.fetch, leads=True)
    await repair.mend_indexes()
    await readers.close()
    assert damage_of(leader.store) == []
    assert not other.asked
