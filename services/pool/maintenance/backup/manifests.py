"""Manifests of backups, and the step that the backups of several shards have in common.

Owns `backup.json` in the directory of a backup, and the rule of the common step.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from forge.core.errors import ConfigError, DataLoss, InvalidArgument
from services.pool.storage.groups.group_index import ORDER, TRAINED, task_of_entry
from services.pool.storage.groups.group_records import group_state
from services.pool.storage.keys import LINEAGE_KEY, SHARD_KEY
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

MANIFEST = "backup.json"
RECENT_STEPS = 200
"""Steps that a manifest names."""
CLOCK_S = 5.0
"""Largest difference between the clocks of pool hosts."""


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One backup."""

    backup_id: str
    """Identity of this content: an erasure in a backup draws a new one."""
    base_id: str = ""
    """The backup that an increment follows; "" for a full one."""
    base: str = ""
    """The directory of that backup, beside this one."""
    shard: str
    lineage: str
    taken_unix_s: float
    """Time before its snapshot."""
    steps: tuple[tuple[int, float], ...]
    """The newest steps that trained groups of the shard, latest first, each with the time of its
    last group."""
    changed: int = 0
    deleted: int = 0
    """Records of an increment."""
    digest: str = ""
    """Digest of the file of an increment."""


def manifest_of(records: Records, *, taken_unix_s: float) -> BackupManifest:
    """Returns the manifest of a full backup of a snapshot."""
    return BackupManifest(
        backup_id=uuid.uuid4().hex,
        shard=records.meta_text(SHARD_KEY),
        lineage=records.meta_text(LINEAGE_KEY),
        taken_unix_s=taken_unix_s,
        steps=tuple(_steps(records)),
    )


def _steps(records: Records) -> list[tuple[int, float]]:
    steps: dict[int, float] = {}
    for key in records.keys_backwards(Table.SETTLED_ORDER, prefix=bytes([TRAINED])):
        step = ORDER.unpack_from(key)[1]
        if step not in steps and len(steps) == RECENT_STEPS:
            break
        settled_unix_s = 0.0
        with suppress(DataLoss, ValueError):
            state = group_state(records, task_of_entry(Table.SETTLED_ORDER, key))
            settled_unix_s = state.settled_unix_s if state is not None else 0.0
        steps[step] = max(steps.get(step, 0.0), settled_unix_s)
    return list(steps.items())


def write_manifest(directory: Path, manifest: BackupManifest) -> None:
    """Stores it in a directory that has no name yet, or replaces it atomically."""
    unfinished = directory / f".{MANIFEST}.unfinished"
    with unfinished.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(directory / MANIFEST)


def read_manifest(directory: Path) -> BackupManifest:
    """Returns the manifest of a backup. Raises `ConfigError` without one, `DataLoss` for a damaged
    one."""
    path = directory / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=BackupManifest)
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} has no {MANIFEST}: it is not a backup, or one of an earlier release"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise DataLoss(f"{path} cannot be read: {error}") from None


def draw_new_id(directory: Path) -> None:
    """The content of a backup has changed, so increments of it no longer fit."""
    if (directory / MANIFEST).exists():
        manifest = read_manifest(directory)
        write_manifest(directory, msgspec.structs.replace(manifest, backup_id=uuid.uuid4().hex))


def common_step(manifests: Sequence[BackupManifest]) -> int:
    """Returns the highest step whose groups are trained in all of these backups; 0 without one.

    One backup a shard. A step k is complete in every shard before step k+1 begins to commit. So
    when a shard shows step k+1 at a time before every backup, each of them has all of step k.
    Raises `InvalidArgument` for two backups of one shard.
    """
    shards = [manifest.shard for manifest in manifests]
    if len(set(shards)) != len(shards):
        raise InvalidArgument(f"there are several backups of one shard: {', '.join(shards)}")
    before_all = min(manifest.taken_unix_s for manifest in manifests) - CLOCK_S
    begun = (
        step
        for manifest in manifests
        for step, settled_unix_s in manifest.steps
        if settled_unix_s <= before_all
    )
    return max(max(begun, default=1) - 1, 0)
