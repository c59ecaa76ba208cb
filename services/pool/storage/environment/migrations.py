"""Migrations of the store's schema.

Owns the schema version, and one migration per step. They run when a shard is opened, in one
transaction: a crash leaves the shard as it was. Raise `SCHEMA_VERSION` with every change that old
code cannot read, or must not write beside, and register its migration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from forge.core.errors import ConfigError, DataLoss
from services.pool.storage.change_log import log_closed
from services.pool.storage.groups.group_index import rebuild
from services.pool.storage.groups.settled_index import index_all_settled
from services.pool.storage.records import Records, decode_header, encode_header
from services.pool.storage.tables import Table

SCHEMA_VERSION = 5

Migration = Callable[[Records], None]

_SCHEMA_KEY = b"schema_version"


def _log_closed_trajectories(records: Records) -> None:
    """1 to 2: the change log. Logs the closed trajectories in the order of their ends."""
    closed = [
        (header.sealed_unix_s, key)
        for key, payload in records.scan(Table.TRAJECTORIES)
        if not (header := decode_header(payload)).is_open
    ]
    for _, key in sorted(closed):
        payload = records.get(Table.TRAJECTORIES, key)
        assert payload is not None
        header = log_closed(records, key, decode_header(payload))
        records.put(Table.TRAJECTORIES, key, encode_header(header))


def _index_settled_groups(records: Records) -> None:
    """2 to 3: the index of settled groups. The age of groups settled before counts from now."""
    index_all_settled(records, now_unix_s=time.time())


MIGRATIONS: Mapping[int, Migration] = {
    1: _log_closed_trajectories,
    2: _index_settled_groups,
    # 3 to 4: indices of pending groups, settled groups and tags, and the counters.
    3: rebuild,
    # 4 to 5: the index of labels.
    4: rebuild,
}
"""Migrations from each version to the next."""


def migrate(
    records: Records,
    *,
    to: int = SCHEMA_VERSION,
    migrations: Mapping[int, Migration] = MIGRATIONS,
) -> int:
    """Brings a shard, in the transaction of `records`, to version `to`; the version before.

    A shard without one is new. Raises `ConfigError` for a later version, or one without a
    migration.
    """
    found = stored_version(records)
    for version in range(found or to, to):
        if version not in migrations:
            raise ConfigError(
                f"the shard has pool schema version {found}, and no migration leads from {version} "
                f"to {version + 1}: open it once with a program of a version between"
            )
        migrations[version](records)
    if found > to:
        raise ConfigError(
            f"the shard has pool schema version {found}, but this program knows only up to "
            f"version {to}: start the version that wrote it, or another data_dir"
        )
    if found != to:
        records.put(Table.META, _SCHEMA_KEY, str(to).encode())
    return found or to


def stored_version(records: Records) -> int:
    """The version of a shard; 0 for a new one. Raises `DataLoss` if it is not a number."""
    stored = records.get(Table.META, _SCHEMA_KEY)
    if stored is None:
        return 0
    text = bytes(stored).decode(errors="replace")
    if not text.isdecimal() or int(text) == 0:
        raise DataLoss(f"the shard's schema_version is {text!r}, which is not a version")
    return int(text)
