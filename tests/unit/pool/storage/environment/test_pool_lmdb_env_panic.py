"""An environment that LMDB has given up."""

from __future__ import annotations

import pytest

from forge.core.errors import ResourceExhausted, Unavailable
from services.pool.actors.writer import Writer
from services.pool.data.commands import PutGroups
from tests.support.pool.lmdb_panic import break_meta_page
from tests.support.pool.records import make_group, make_turn
from tests.support.pool.store import append


def test_first_panic_is_reported_once(open_store, tmp_path):
    """After MDB_PANIC every write and read is UNAVAILABLE, and the owner is notified once."""
    panics: list[str] = []
    store = open_store(on_panic=lambda error: panics.append(str(error)))
    append(store, make_turn("t:0:0"))
    break_meta_page(tmp_path / "shard")

    with pytest.raises(ResourceExhausted):
        append(store, make_turn("t:1:0"))
    assert panics == []

    with pytest.raises(Unavailable, match="MDB_PANIC"):
        append(store, make_turn("t:1:0"))
    with pytest.raises(Unavailable, match="MDB_PANIC"):
        store.stats()
    (said,) = panics
    assert "MDB_PANIC" in said


def test_writer_answers_a_panic_as_unavailable(open_store, tmp_path):
    """Senders may resend: the status is UNAVAILABLE for each of them, not INTERNAL."""
    store = open_store()
    break_meta_page(tmp_path / "shard")
    writer = Writer(store)
    outcomes = [writer.receive_batch([PutGroups(groups=(make_group(),), fence=1)]) for _ in "ab"]
    assert [type(outcome) for (outcome,) in outcomes] == [ResourceExhausted, Unavailable]


def test_shard_opens_whole_after_a_panic(open_store, tmp_path):
    """Writes acknowledged before the panic are there in the next process."""
    store = open_store()
    append(store, make_turn("t:0:0"))
    break_meta_page(tmp_path / "shard")
    for _ in range(2):
        with pytest.raises((ResourceExhausted, Unavailable)):
            append(store, make_turn("t:1:0"))
    assert open_store().stats().trajectories == 1
