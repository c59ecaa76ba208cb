"""The digest of a group: equal as long as none of its records changes."""

from __future__ import annotations

from hashlib import blake2b

from services.pool.storage.groups.moved_groups import is_moved
from services.pool.storage.keys import group_key, task_prefix
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

_DIGEST_BYTES = 16
_DIGESTED = (Table.TRAJECTORIES, Table.REWARDS)


def group_digest(records: Records, task_id: str) -> bytes:
    """Digest of all records of a group; b"" for a group that is not here or has moved. Of turns,
    which never change, it has the keys."""
    key = group_key(task_id)
    if not records.has(Table.GROUPS, key) or is_moved(records, task_id):
        return b""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for table in (Table.GROUPS, Table.STATES):
        digest.update(records.get_checksummed(table, key) or b"")
    for table in _DIGESTED:
        for found, value in records.scan_checksummed(table, prefix=task_prefix(task_id)):
            digest.update(found)
            digest.update(value)
    for found in records.keys(Table.TURNS, prefix=task_prefix(task_id)):
        digest.update(found)
    return digest.digest()
