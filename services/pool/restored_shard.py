"""Detects groups that were trained since the backup that a shard was restored from.

    restored.json   written by `restore`: the newest step that trained groups of the backup

A trainer beyond that step may have trained groups that are pending again in the restored shard, and
would train them a second time. Owns the file, the comparison with the trainers, and the error. The
file goes once a trainer has returned to the step, or to an earlier one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from forge.runtime.files.sync import sync
from forge.runtime.telemetry import log
from services.pool.metrics import TRAINED_SINCE_BACKUP

FILE = "restored.json"
PERIOD_S = 1.0
"""A trainer that returned to an earlier step is seen before it trains the next one."""

TrainedStep = Callable[[], Awaitable[int | None]]
"""Returns the newest step of the trainer that trains; None without one."""


class RestoredFrom(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    step: int
    """The newest step that trained groups of the backup; 0 without one."""


def note_restored(directory: Path, step: int) -> None:
    """Writes the file into the directory of a restored shard."""
    path = directory / FILE
    with path.open("wb") as file:
        file.write(msgspec.json.encode(RestoredFrom(step=step)))
        file.flush()
        os.fsync(file.fileno())


async def watch_restored(directory: Path, shard: str, trained_step: TrainedStep) -> None:
    """Compares until the trainers are at a step that the backup has; at once without the file."""
    path = directory / FILE
    if not path.exists():
        return
    restored = msgspec.json.decode(path.read_bytes(), type=RestoredFrom)
    logged_step = 0
    while True:
        step = await trained_step()
        if step is not None and step <= restored.step:
            path.unlink()
            sync(directory)
            TRAINED_SINCE_BACKUP.set(0)
            log.info("restored_shard_fits", pool_shard=shard, step=step)
            return
        if step is not None and not logged_step:
            log.error(
                "trained_since_backup",
                pool_shard=shard,
                backup_step=restored.step,
                trained_step=step,
                remedy=f"groups of steps {restored.step + 1} to {step} may be pending again: stop "
                "the trainers and restore a checkpoint of `forge pool watermark`, or delete "
                f"{path} to accept that they are trained twice, and restart",
            )
            logged_step = step
        if step is not None:
            TRAINED_SINCE_BACKUP.set(logged_step - restored.step)
        await asyncio.sleep(PERIOD_S)
