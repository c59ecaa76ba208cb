"""Backups of a shard from a timer: full ones, increments between them, and the end of old ones.

    <folder>/<shard>-<time>/    a backup, by the time of its start
    <folder>/.<shard>.lock      held by the one process that backs the shard up

Owns the choice between a full backup and an increment, and the deletion of old chains. A chain is a
full backup with its increments. It is deleted from its last increment on, so kill -9 at any moment
leaves chains that restore.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from forge.core.errors import ConfigError, DataLoss, FailedPrecondition
from services.pool.maintenance.backup.backup import Progress, backup, check, room, shard_name
from services.pool.maintenance.backup.increments import MAX_CHAIN, back_up_changes
from services.pool.maintenance.backup.manifests import BackupManifest, read_manifest
from services.pool.maintenance.integrity import Damage
from services.pool.storage.environment.file_locks import unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A complete backup."""

    directory: Path
    manifest: BackupManifest

    @property
    def is_full(self) -> bool:
        """Whether it needs no other backup."""
        return not self.manifest.base_id


@dataclass(slots=True, kw_only=True)
class Scheduled:
    """The result of one run."""

    made: Path
    full_because: str = ""
    """The reason for a full backup; "" for an increment."""
    damage: list[Damage] = field(default_factory=list)
    """Damage in a full backup, which is the shard's own; then nothing is deleted."""
    deleted: list[Path] = field(default_factory=list)


def backups_in(folder: Path) -> list[Backup]:
    """The backups in a folder, of all shards, oldest first; those without a readable manifest are
    left out."""
    found = []
    for directory in folder.iterdir() if folder.is_dir() else ():
        if directory.name.startswith(".") or not directory.is_dir():
            continue
        try:
            found.append(Backup(directory=directory, manifest=read_manifest(directory)))
        except (ConfigError, DataLoss):
            continue
    return sorted(found, key=lambda one: (one.manifest.taken_unix_s, one.directory.name))


def newest_of_each_shard(folder: Path) -> list[Path]:
    """The newest backup of each shard in a folder, by the name of the shard."""
    newest = {one.manifest.shard: one.directory for one in backups_in(folder)}
    return [newest[shard] for shard in sorted(newest)]


def back_up_scheduled(
    source: Path,
    folder: Path,
    progress: Progress,
    *,
    full_every_s: float,
    keep: int,
    now_unix_s: float,
) -> Scheduled:
    """Backs the shard in `source` up into a new directory of `folder`: as an increment of the
    newest backup, or in full if that is due or impossible. Then deletes all but the `keep` newest
    chains, if a full backup has no damage.

    Raises `FailedPrecondition` while another process does it, otherwise as `backup`.
    """
    shard = shard_name(source)
    with room():
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, shard):
        for stray in folder.glob(f".{shard}-*.unfinished"):
            delete(stray)
        known = [one for one in backups_in(folder) if one.manifest.shard == shard]
        taken = datetime.fromtimestamp(now_unix_s, UTC)
        target = folder / f"{shard}-{taken:%Y%m%dT%H%M%S}.{taken.microsecond // 1000:03d}Z"
        reason = _reason_for_full(known, full_every_s=full_every_s, now_unix_s=now_unix_s)
        if not reason:
            try:
                back_up_changes(source, known[-1].directory, target, progress)
                return Scheduled(made=target)
            except (FailedPrecondition, ConfigError, DataLoss) as error:
                # The base was damaged, erased in, or is of another store.
                reason = str(error)
        backup(source, target, progress)
        result = Scheduled(made=target, full_because=reason)
        result.damage.extend(check(target, progress))
        if not result.damage:
            result.deleted = _delete_old(
                [one for one in backups_in(folder) if one.manifest.shard == shard], keep
            )
        return result


def _reason_for_full(known: Sequence[Backup], *, full_every_s: float, now_unix_s: float) -> str:
    """Reason why the next backup is a full one; "" if an increment suffices."""
    fulls = [at for at, one in enumerate(known) if one.is_full]
    if not fulls:
        return "it is the first"
    if now_unix_s - known[fulls[-1]].manifest.taken_unix_s >= full_every_s:
        return "the last full one is old enough"
    if len(known) - fulls[-1] > MAX_CHAIN:
        return f"{MAX_CHAIN} increments follow the last full one"
    return ""


def _delete_old(known: Sequence[Backup], keep: int) -> list[Path]:
    """Deletes all backups but those of the `keep` newest chains, and the increments that follow an
    earlier content of their base: no restore takes them, and they may have what was erased."""
    root: dict[str, str] = {}
    """The full backup of each chain, by the id of each of its backups."""
    for one in known:
        own, base = one.manifest.backup_id, one.manifest.base_id
        root[own] = own if one.is_full else root.get(base, "")
    kept = {one.manifest.backup_id for one in [each for each in known if each.is_full][-keep:]}
    deleted = []
    for one in reversed(known):
        chain = root[one.manifest.backup_id]
        has_base = one.is_full or (one.directory.parent / one.manifest.base).exists()
        if chain in kept or (not chain and not has_base):
            continue
        gone = unfinished(one.directory)
        one.directory.rename(gone)
        delete(gone)
        deleted.append(one.directory)
    return deleted


def delete(directory: Path) -> None:
    """Deletes a directory that no longer has the name of a backup."""
    shutil.rmtree(directory)


@contextmanager
def _locked(folder: Path, shard: str) -> Iterator[None]:
    """One process per shard and folder. Raises `FailedPrecondition` for a second one."""
    try:
        descriptor = os.open(folder / f".{shard}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise FailedPrecondition(f"another process backs shard {shard} up into {folder}") from None
    finally:
        os.close(descriptor)
