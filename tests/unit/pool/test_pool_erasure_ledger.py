"""The ledger of erasures: what an entry selects, and who else may have its id."""

from __future__ import annotations

import pytest

from forge.core.errors import InvalidArgument
from forge.runtime.coordination import Coordinator
from forge.v1 import pool_pb2
from services.pool.data.commands import NoteErasures
from services.pool.erasure_ledger import PREFIX, ErasureLedger, LedgerEntry, tasks_of
from services.pool.storage.erasures import noted_erasures
from services.pool.store import PoolStore
from services.pool.validation import check_erase
from tests.support.pool.records import make_group
from tests.support.pool.store import commit, put_groups


def entry_of(erasure_id: str = "e1", **selection: object) -> LedgerEntry:
    request = pool_pb2.EraseTrajectoriesRequest(erasure_id=erasure_id, **selection)  # type: ignore[arg-type]
    return LedgerEntry.of(request, now_unix_s=5.0)


@pytest.fixture
def ledger(coordinator: Coordinator) -> ErasureLedger:
    return ErasureLedger(coordinator)


async def test_entry_selects_the_same_groups_as_its_request(store: PoolStore) -> None:
    """By task id, user or tag; a group without a user is in no erasure of a user."""
    for index, (user, tag) in enumerate((("alice", ""), ("", "week"), ("bob", "week"), ("", ""))):
        group = make_group(f"t{index}", index)
        group.task.user, group.task.tag = user, tag
        put_groups(store, group)

    def selected(*entries: LedgerEntry) -> list[str]:
        return store.read(lambda records: tasks_of(records, entries))

    assert selected(entry_of(user="alice")) == ["t0"]
    assert selected(entry_of(tag="week")) == ["t1", "t2"]
    assert selected(entry_of(task_ids=["t3", "gone"])) == ["t3", "gone"]
    assert selected(entry_of(user="alice"), entry_of("e2", tag="week")) == ["t0", "t1", "t2"]


async def test_ledger_has_no_name_of_a_user_or_a_tag(store: PoolStore) -> None:
    """Neither in etcd nor in a store; an entry is the same after both."""
    entry = entry_of(user="alice")
    assert b"alice" not in entry.encoded()
    assert b"week" not in entry_of(tag="week").encoded()
    assert entry.user != entry_of("e2", user="alice").user
    assert LedgerEntry.decoded(entry.encoded()) == entry
    commit(store, NoteErasures(entries={"e1": entry.encoded()}))
    commit(store, NoteErasures(entries={"e1": b"other"}))
    assert store.read(noted_erasures) == {"e1": entry.encoded()}


async def test_id_belongs_to_one_erasure(ledger: ErasureLedger, coordinator: Coordinator) -> None:
    """Its repetition is no error; other keys of the prefix are no entries."""
    await ledger.record(entry_of(user="alice"))
    await ledger.record(entry_of(user="alice"))
    with pytest.raises(InvalidArgument, match="'e1' belongs to an erasure of other tasks"):
        await ledger.record(entry_of(user="bob"))
    await coordinator.compare_and_swap(f"{PREFIX}server", b'{"host": "h"}', expected_revision=0)
    assert await ledger.ids() == {"e1", "server"}
    assert await ledger.read("server") is None
    assert await ledger.read("e1") == entry_of(user="alice")


def test_wrong_erasure_ids_are_refused() -> None:
    """They become keys in etcd."""
    for wrong in ("a/b", "x" * 65, "ü"):
        request = pool_pb2.EraseTrajectoriesRequest(user="a", erasure_id=wrong)
        with pytest.raises(InvalidArgument, match="erasure_id"):
            check_erase(request)
