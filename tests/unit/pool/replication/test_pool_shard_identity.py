"""Which store a shard's name belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.runtime.coordination.shard_record import ShardRecord
from services.pool.config import PoolConfig
from services.pool.replication.shard_identity import may_serve, record_of
from services.pool.storage.environment.file_locks import set_hand_over_mark
from services.pool.storage.keys import LINEAGE_KEY
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.replicas import LINEAGE, linked
from tests.support.runtime.waiting import until


def test_lineage_of_a_store_never_changes(open_store):
    """A store has the same lineage and directory id whenever it is opened; another store has
    others."""
    store = open_store(shard="s0")
    drawn = (store.lineage(), store.directory_id)
    assert all(drawn)
    again = open_store()
    assert (again.lineage(), again.directory_id) == drawn


@pytest.mark.parametrize("replicated", [True, False])
def test_store_of_an_earlier_version_gets_a_lineage(node, replicated):
    """That of its replicas, which each finds by itself; else its own."""
    one = node("a")
    if replicated:
        one.lead()
    one.store.write(lambda records: records.delete(Table.META, LINEAGE_KEY))
    one.crash()
    assert one.store.lineage()
    assert (one.store.lineage() == LINEAGE) == replicated


async def test_follower_adopts_the_lineage_of_its_leader(node):
    """An empty store that copied everything belongs to the shard that it follows."""
    leader, follower = node("a"), node("b")
    leader.lead()
    assert follower.store.lineage() != leader.store.lineage()
    async with linked(leader, follower) as link:
        await until(lambda: link.confirmed)
    assert follower.store.lineage() == leader.store.lineage()
    assert follower.store.directory_id != leader.store.directory_id


def binding(store: PoolStore, *, replicated: bool = False) -> ShardRecord:
    return record_of(store, PoolConfig(instance_id="pool-0"), replicated=replicated)


def test_shard_name_belongs_to_one_store(tmp_path: Path):
    """Without a record any store may use it; with a record the store it names, or one with the
    mark."""
    first, second = (PoolStore(tmp_path / name, shard="s0") for name in ("first", "second"))
    named = binding(first)
    for replicated in (True, False):
        assert may_serve(None, second, replicated=replicated)
        assert may_serve(named, first, replicated=replicated)
        assert not may_serve(named, second, replicated=replicated)
    assert not may_serve(binding(first, replicated=True), second, replicated=True)
    set_hand_over_mark(tmp_path / "second")
    assert may_serve(named, second, replicated=False)
    first.close()
    second.close()


def test_replicated_shard_is_served_alone_only_by_a_replica(node):
    """A copy of the files that never was a replica may not."""
    one = node("a")
    named = binding(one.store, replicated=True)
    assert may_serve(named, one.store, replicated=True)
    assert not may_serve(named, one.store, replicated=False)
    one.lead()
    assert may_serve(named, one.store, replicated=False)
