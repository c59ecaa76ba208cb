"""Fuzz targets: records of a pool shard in a real LMDB environment. A damaged record is `DataLoss`
at each read, and a finding of the check."""

from __future__ import annotations

import atexit
import base64
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import DataLoss, InvalidArgument
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2, replica_pb2
from services.pool.data.reads import query, reads
from services.pool.data.reads.group_scan import count_settled, find_newest_settled
from services.pool.data.reads.stats import Tally
from services.pool.data.removal import orphans
from services.pool.maintenance.integrity import Checker
from services.pool.storage.change_log import changes_after, number_before
from services.pool.storage.groups.indexed_groups import is_whole, trained_after
from services.pool.storage.groups.settled_index import settled_after
from services.pool.storage.journal import replica_state
from services.pool.storage.record_copies import _fetched, copied_records, units_of
from services.pool.storage.record_names import describe
from services.pool.storage.records import Records
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import append, change, put_groups, seal, set_states
from tests.support.suite.damaged import PIECES, damaged, edited, messages

Place = tuple[Table, bytes, bytes]
"""Table, key and value of a record as stored."""
NAMES = [parse_trajectory_id(f"{task}:0:0") for task in ("a", "b")]
FILTERS = (
    pool_pb2.TrajectoryFilter(),
    pool_pb2.TrajectoryFilter(min_reward=0.0),
    pool_pb2.TrajectoryFilter(closed_from_unix_s=1.0),
)
edits = st.lists(
    st.tuples(
        st.integers(0, 2**16),
        st.integers(0, 8),
        st.binary(max_size=2) | st.sampled_from([piece for piece in PIECES if len(piece) < 500]),
    ),
    min_size=1,
    max_size=3,
)


@cache
def filled() -> tuple[PoolStore, list[Place]]:
    """A shard with records in each table, and these records."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    store = PoolStore(Path(folder.name), shard="s0", map_bytes=1 << 22)
    atexit.register(store.close)
    store.count_commits(lambda position, changes: None)
    put_groups(store, make_group("a", 0), make_group("b", 1), make_group("c", 2))
    append(store, make_turn("a:0:0"), make_turn("a:0:0", 1), make_turn("b:0:0"))
    seal(store, "a:0:0", turns=2, rewards=[make_reward()])
    set_states(store, change("a", common_pb2.GROUP_STATE_TRAINED, batch_id="b", step=4))
    set_states(store, change("b", common_pb2.GROUP_STATE_TOMBSTONED, reason="no runner"))

    def every(records: Records) -> list[Place]:
        scans = ((table, records.scan_checksummed(table)) for table in Table)
        return [(table, key, value) for table, scan in scans for key, value in scan]

    return store, store.read(every)


def reads_of(records: Records) -> list[Callable[[], Any]]:
    """Every read of a shard."""
    known = pool_pb2.LookUpGroupsRequest(task_ids=["a", "b"], batch_ids=["b"])
    pages = [pool_pb2.QueryTrajectoriesRequest(filter=wanted) for wanted in FILTERS]
    return [
        partial(reads.look_up, records, request=known, limit_bytes=1 << 20),
        partial(reads.summaries, records, NAMES),
        partial(reads.trajectories, records, NAMES, limit_bytes=1 << 20),
        partial(reads.groups, records, after=b"", limit=9, limit_bytes=1 << 20, brief=False),
        *(partial(query.query, records, request=page, shard="s0") for page in pages),
        partial(orphans.orphans_after, records, b"", limit=9),
        partial(find_newest_settled, records, limit=9),
        partial(count_settled, records, pool_pb2.SettledGroups()),
        lambda: is_whole(records) and trained_after(records, 1),
        lambda: list(islice(settled_after(records, b""), 9)),
        lambda: list(changes_after(records, 0)),
        partial(number_before, records, 1.0),
        partial(replica_state, records),
        lambda: Tally().advance(records),
        lambda: copied_records(records, [(Table.TRAJECTORIES, b"a:" + bytes(8))]),
    ]


class Undone(Exception):
    """Ends a transaction without a commit."""


def with_record(place: Place, look: Callable[[Records], None]) -> None:
    """Looks at the shard with one record replaced; then the shard is as before."""
    table, key, value = place

    def replaced(records: Records) -> None:
        records.put_checksummed(table, key, value)
        look(records)
        raise Undone

    with suppress(Undone):
        filled()[0].environment.write(replaced)


@given(st.integers(0, 2**16), edits)
def test_damaged_values(number: int, changes: list[tuple[int, int, bytes]]) -> None:
    """Each read of a shard with a damaged value returns, or raises `DataLoss`."""
    _, places = filled()
    table, key, value = places[number % len(places)]

    def look(records: Records) -> None:
        for read in reads_of(records):
            try:
                read()
            except DataLoss as error:
                assert str(error)

    with_record((table, key, edited(value, changes)), look)


def check(records: Records) -> None:
    """The check of a shard, with at least one finding."""
    checker = Checker(records._transaction, filled()[0].environment._databases)
    found = list(checker.damage())
    assert found
    assert all(map(str, found))


@given(st.integers(0, 2**16), edits)
def test_check_of_damaged_values(number: int, changes: list[tuple[int, int, bytes]]) -> None:
    """The check of a shard lists any damaged value."""
    _, places = filled()
    table, key, value = places[number % len(places)]
    changed = edited(value, changes)
    if changed != value:
        with_record((table, key, changed), check)


def test_check_of_a_damaged_end_of_the_change_log() -> None:
    """The check lists it, and checks the entries of the log without it."""
    with_record((Table.META, b"change_log", bytes(20)), check)


@given(st.sampled_from(list(Table)), damaged(b"a:" + bytes(8), b"a", bytes(9) + b"a"))
def test_keys(table: Table, key: bytes) -> None:
    """Each key has a name for operators, and units to repair."""
    assert isinstance(describe(table, key), str)
    units_of(table, key)


TOKEN = msgspec.msgpack.encode(("s0", b"h" * 8, b"a:" + bytes(8)))


@given(damaged(TOKEN).map(base64.urlsafe_b64encode) | damaged(base64.urlsafe_b64encode(TOKEN)))
def test_page_tokens(token: bytes) -> None:
    """Any page token is a position, or refused."""
    request = pool_pb2.QueryTrajectoriesRequest(page_token=token.decode("latin-1"))
    try:
        filled()[0].read(partial(query.query, request=request, shard="s0"))
    except InvalidArgument as error:
        assert "page_token" in str(error)


@given(messages(replica_pb2.RecordChanges))
def test_copied_records(sent: replica_pb2.RecordChanges) -> None:
    """Records of another replica are taken if intact."""
    _fetched(sent.SerializeToString())
