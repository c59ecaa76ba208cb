"""Opening shards of other schemas."""

from __future__ import annotations

import msgspec
import pytest

from forge.core.errors import ConfigError, DataLoss
from forge.core.trajectory import parse_trajectory_id
from services.pool.storage.change_log import ChangeKind, changes_after
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.environment.migrations import SCHEMA_VERSION, migrate, stored_version
from services.pool.storage.keys import trajectory_key
from services.pool.storage.tables import Table
from tests.support.pool.records import make_reward, make_turn
from tests.support.pool.store import append, fetch, reward, seal, summary

MIB = 1 << 20
FIELDS_OF_VERSION_1 = 8
"""Of a trajectory's header."""


@pytest.fixture
def environment(tmp_path):
    made = Environment(tmp_path / "shard", map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4)
    yield made
    made.close()


def version_of(environment) -> int:
    found: int = environment.read(stored_version)
    return found


def as_version_1(records) -> None:
    """Takes out of a shard what version 1 did not have."""
    for key, payload in list(records.scan(Table.TRAJECTORIES)):
        fields = msgspec.msgpack.decode(payload)[:FIELDS_OF_VERSION_1]
        records.put(Table.TRAJECTORIES, key, msgspec.msgpack.encode(fields))
    for key, _ in list(records.scan(Table.CHANGES)):
        records.delete(Table.CHANGES, key)
    records.delete(Table.META, b"change_log")
    records.put(Table.META, b"schema_version", b"1")


def test_shard_of_version_1_opens_with_a_change_log(open_store, tmp_path):
    """All its data is served as before, closed trajectories are logged in the order of closing, and
    later changes follow."""
    store = open_store(shard="s0")
    for number, closed_unix_s in ((0, 30.0), (1, 10.0), (2, 20.0)):
        append(store, make_turn(f"t:{number}:0"))
        seal(store, f"t:{number}:0", rewards=[make_reward()], now_unix_s=closed_unix_s)
    append(store, make_turn("t:3:0"))
    before = [fetch(store, f"t:{number}:0") for number in range(4)]
    store.close()
    old = Environment(tmp_path / "shard", map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4)
    old.write(as_version_1)
    old.close()

    store = open_store()
    assert [fetch(store, f"t:{number}:0") for number in range(4)] == before
    seal(store, "t:3:0", now_unix_s=40.0)
    reward(store, make_reward("late"), trajectory_id="t:1:0")
    assert len(summary(store, "t:1:0").rewards) == 2
    store.close()
    new = Environment(tmp_path / "shard", map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4)
    assert version_of(new) == SCHEMA_VERSION
    log = new.read(lambda records: [entry for _, entry in changes_after(records, 0)])
    new.close()
    keys = [trajectory_key(parse_trajectory_id(f"t:{number}:0")) for number in (1, 2, 0, 3, 1)]
    assert [entry.trajectory for entry in log] == keys
    assert [entry.kind for entry in log] == [ChangeKind.CLOSED] * 4 + [ChangeKind.REWARDED]


def test_migrations_run_in_order_and_once(environment):
    """A chain leads from the stored version to the wanted one, step by step; a current shard is not
    changed."""
    taken = []
    chain = {
        version: lambda records, version=version: taken.append(version)
        for version in range(1, SCHEMA_VERSION + 3)
    }
    for _ in range(2):
        environment.write(lambda records: migrate(records, to=SCHEMA_VERSION + 2, migrations=chain))
    assert taken == [SCHEMA_VERSION, SCHEMA_VERSION + 1]
    assert version_of(environment) == SCHEMA_VERSION + 2


def test_failed_migration_leaves_the_shard_unchanged(environment):
    """If the second step fails, the first step is undone."""

    def first(records) -> None:
        records.put(Table.META, b"made_by_first", b"x")

    def second(records) -> None:
        raise DataLoss("a record cannot be read")

    chain = {SCHEMA_VERSION: first, SCHEMA_VERSION + 1: second}
    with pytest.raises(DataLoss):
        environment.write(lambda records: migrate(records, to=SCHEMA_VERSION + 2, migrations=chain))
    assert version_of(environment) == SCHEMA_VERSION
    assert environment.read(lambda records: records.get(Table.META, b"made_by_first")) is None


def test_map_grows_during_a_migration(environment):
    """The migration then runs again from the start."""

    def fill(records) -> None:
        for number in range(300):
            records.put(Table.TURNS, b"%d" % number, bytes(10_000))

    chain = {SCHEMA_VERSION: fill}
    environment.write(lambda records: migrate(records, to=SCHEMA_VERSION + 1, migrations=chain))
    assert environment.map_bytes > MIB
    assert environment.read(lambda records: records.count(Table.TURNS)) == 300


@pytest.mark.parametrize(
    ("stored", "error", "complaint"),
    [
        (b"999", ConfigError, f"version 999.*only up to version {SCHEMA_VERSION}"),
        (b"0", DataLoss, "'0', which is not a version"),
        (b"x", DataLoss, "'x', which is not a version"),
    ],
)
def test_version_without_a_migration_is_refused_in_one_line(
    environment, tmp_path, stored, error, complaint
):
    """A newer shard, and one whose version is no number, are not changed."""
    environment.write(lambda records: records.put(Table.META, b"schema_version", stored))
    environment.close()
    with pytest.raises(error, match=complaint) as refused:
        Environment(tmp_path / "shard", map_bytes=MIB, map_max_bytes=MIB, max_readers=4)
    assert "\n" not in str(refused.value)


def test_gap_in_the_migrations_is_named(environment):
    """A version without a migration is refused by name."""
    with pytest.raises(ConfigError, match=f"no migration leads from {SCHEMA_VERSION} to"):
        environment.write(lambda records: migrate(records, to=SCHEMA_VERSION + 1, migrations={}))
