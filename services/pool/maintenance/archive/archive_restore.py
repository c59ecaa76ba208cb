"""Restores archived groups into the store of a new shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from forge.core.errors import ConfigError, ForgeError
from services.pool.data.commands import Command, ImportGroup, StageRecords
from services.pool.maintenance.archive.archive import (
    Archive,
    SegmentEntry,
    SegmentGroup,
    archives_at,
)
from services.pool.maintenance.backup.backup import check, new_directory
from services.pool.maintenance.integrity import Damage
from services.pool.storage.environment.file_locks import LOCK
from services.pool.storage.tables import CONTENT, Key, Table
from services.pool.store import PoolStore

_PAGE_BYTES = 1 << 20


def restore_archive(
    url: str, target: Path, *, shard: str, progress: Callable[[int, int], None]
) -> list[Damage]:
    """Writes every archived group, as it was archived last, into a new data directory, and checks
    it. Returns its damage; then nothing is restored.

    Raises `ConfigError` if there is no archive, or several stores' archives, `DataLoss` for a
    damaged segment, otherwise as `backup`.
    """
    archives = archives_at(url)
    if len(archives) != 1:
        names = ", ".join(archive.folder for archive in archives)
        hint = f": name one of {names}" if names else ""
        raise ConfigError(f"{url} has {len(archives)} archives{hint}")
    (archive,) = archives
    entries = archive.entries()
    newest = {task_id: entry for entry in entries for task_id in entry.groups}
    damage: list[Damage] = []
    with new_directory(target, keep=lambda: not damage) as made:
        store = PoolStore(made, shard=shard)
        try:
            for done, group in enumerate(_groups(archive, entries, newest), start=1):
                for command in _commands(group):
                    (answer,) = store.commit([command])
                    if isinstance(answer, ForgeError):
                        raise answer
                progress(done, len(newest))
        finally:
            store.close()
        damage.extend(check(made, lambda done, of: progress(len(newest), len(newest))))
        (made / LOCK).unlink(missing_ok=True)
    return damage


def _groups(
    archive: Archive, entries: list[SegmentEntry], newest: Mapping[str, SegmentEntry]
) -> Iterator[SegmentGroup]:
    for entry in entries:
        if any(newest[task_id] is entry for task_id in entry.groups):
            for group in archive.groups(entry):
                if newest[group.task_id] is entry:
                    yield group


def _commands(group: SegmentGroup) -> Iterator[Command]:
    """Turns and rewards in pages, then the rest."""
    rest: list[tuple[Key, bytes]] = []
    page: list[tuple[Key, bytes]] = []
    size_bytes = staged = 0
    for name, key, value in group.records:
        table = Table(name)
        if table not in CONTENT:
            rest.append(((table, key), value))
            continue
        page.append(((table, key), value))
        staged += 1
        size_bytes += len(value)
        if size_bytes >= _PAGE_BYTES:
            yield StageRecords(values=tuple(page), fence=0)
            page, size_bytes = [], 0
    if page:
        yield StageRecords(values=tuple(page), fence=0)
    yield ImportGroup(
        task_id=group.task_id, values=tuple(rest), staged=staged, erased=False, fence=0
    )
