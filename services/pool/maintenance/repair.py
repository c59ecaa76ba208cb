"""Repair of a stopped shard from another copy: a directory or a running replica.

Owns the loop over its damage, one unit per transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from forge.core.errors import ConfigError
from services.pool.data.repair.record_repair import repair_unit
from services.pool.maintenance.backup.backup import Progress, check, snapshot
from services.pool.maintenance.integrity import Damage
from services.pool.storage.environment.lmdb_env import opened_alone
from services.pool.storage.groups.group_index import rebuild
from services.pool.storage.journal import replica_state
from services.pool.storage.keys import LINEAGE_KEY, SHARD_KEY
from services.pool.storage.record_copies import CopiedRecords, copied_records, units_of
from services.pool.storage.records import Records
from services.pool.storage.tables import Key

Fetch = Callable[[Key], CopiedRecords]
"""Reads one unit from a copy."""
OpenCopy = Callable[[str, str], AbstractContextManager[Fetch]]
"""Opens a copy of the shard of that name and lineage."""


def repair(directory: Path, open_copy: OpenCopy, progress: Progress) -> list[Damage]:
    """Repairs the stopped shard in `directory`; the remaining damage.

    Raises `InUse` while the shard is served, `ConfigError` for a copy of another shard, and as
    `check` does.
    """
    damage = list(check(directory, progress))
    if not damage:
        return []
    with opened_alone(directory) as environment:
        shard, lineage, since = environment.read(_identity)
        units = {unit: None for one in damage for unit in units_of(one.table, one.key)}
        with open_copy(shard, lineage) as fetch:
            for unit in units:
                change = partial(repair_unit, unit=unit, copy=fetch(unit), since=since)
                environment.write(change)
            environment.write(rebuild)
    return list(check(directory, progress))


def _identity(records: Records) -> tuple[str, str, int]:
    """Name and lineage of the shard, and the newest commit of this replica; 0 without
    replication."""
    state = replica_state(records)
    position = state.position if state.lineage else 0
    return records.meta_text(SHARD_KEY), records.meta_text(LINEAGE_KEY), position


def copy_in(directory: Path) -> OpenCopy:
    """A copy in a directory that no process writes. Raises as `backup.check` does."""

    @contextmanager
    def open_copy(shard: str, lineage: str) -> Iterator[Fetch]:
        with snapshot(directory) as (transaction, databases):
            records = Records(transaction, databases)
            if not lineage or _identity(records)[1] != lineage:
                raise ConfigError(f"{directory} is not a copy of this shard: its lineage differs")
            yield lambda unit: copied_records(records, [unit])

    return open_copy
