"""Erasure in a backup: a copy that no instance serves.

Owns no rule: `data.removal.task_erasure` deletes the records, `backup.compact` their bytes in free
pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from forge.core.errors import FailedPrecondition
from forge.v1 import pool_pb2
from services.pool.data.commands import EraseTasks
from services.pool.data.removal.task_erasure import Erased, erase, tasks_with
from services.pool.maintenance.backup.backup import Progress, compact, shard_name
from services.pool.maintenance.backup.manifests import draw_new_id
from services.pool.storage.environment.lmdb_env import opened_alone
from services.pool.storage.erasures import put_purged, unpurged_erasure
from services.pool.storage.records import Records
from services.pool.validation import check_erase

_MAX_RECORDS = 1024

T = TypeVar("T")


def erase_in(
    directory: Path, request: pool_pb2.EraseTrajectoriesRequest, progress: Progress
) -> Erased:
    """Erases in the backup in `directory`. Raises `FailedPrecondition` for the directory of an
    instance, and as `backup.compact` does."""
    check_erase(request)
    shard_name(directory)
    if (directory / "replica").exists():
        raise FailedPrecondition(
            f"{directory} is the data_dir of a pool instance: start it, then erase without --backup"
        )
    task_ids = tuple(request.task_ids) or tuple(
        _write(directory, partial(tasks_with, user=request.user, tag=request.tag))
    )
    total = Erased(unfinished=True)
    while total.unfinished:
        command = EraseTasks(task_ids=task_ids, max_records=_MAX_RECORDS, now_unix_s=time.time())
        total = total.plus(_write(directory, partial(erase, command=command)))
    erasure = _write(directory, unpurged_erasure)
    draw_new_id(directory)
    if erasure:
        compact(directory, progress, purge=True)
        _write(directory, partial(put_purged, erasure=erasure))
    return total


def _write(directory: Path, change: Callable[[Records], T]) -> T:
    with opened_alone(directory) as environment:
        return environment.write(change)
