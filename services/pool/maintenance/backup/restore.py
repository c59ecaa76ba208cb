"""Restores a backup, full or incremental, into a new data directory."""

from __future__ import annotations

from pathlib import Path

from forge.core.errors import ConfigError
from services.pool.maintenance.backup.backup import (
    Progress,
    check,
    copy_file,
    new_directory,
    snapshot,
)
from services.pool.maintenance.backup.increments import is_increment, write_restored
from services.pool.maintenance.backup.manifests import manifest_of
from services.pool.maintenance.integrity import Damage
from services.pool.restored_shard import note_restored
from services.pool.storage.environment.file_locks import DATA, LOCK, set_hand_over_mark
from services.pool.storage.environment.lmdb_env import opened_alone
from services.pool.storage.records import Records


def restore(backup: Path, target: Path, progress: Progress) -> list[Damage]:
    """Writes a backup into a new data directory, brings it to the present schema, and checks it.
    Returns its damage; then nothing is restored. Raises as `backup` and `write_restored` do."""
    if not (backup / DATA).exists() and not is_increment(backup):
        raise ConfigError(f"{backup} holds no backup: there is no {DATA}")
    damage: list[Damage] = []
    with new_directory(target, keep=lambda: not damage) as copy:

        def written(done: int, of: int) -> None:
            progress(done, 2 * of)

        def checked(done: int, of: int) -> None:
            progress(of + done, 2 * of)

        if is_increment(backup):
            write_restored(backup, copy, written)
        else:
            size_bytes = (backup / DATA).stat().st_size
            copy_file(backup / DATA, copy / DATA, lambda done: written(done, size_bytes))
        with opened_alone(copy):
            pass  # Migrates a backup of an earlier release.
        damage.extend(check(copy, checked))
        if not damage:
            with snapshot(copy) as opened:
                steps = manifest_of(Records(*opened), taken_unix_s=0.0).steps
            note_restored(copy, steps[0][0] if steps else 0)
        # What reading has left there belongs to this copy's old name.
        (copy / LOCK).unlink(missing_ok=True)
        set_hand_over_mark(copy)
    return damage
