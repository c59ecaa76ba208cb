"""Lines about a full disk of a run: once when it stops the run, once when there is room again.

Owns the wording and the limit. Reads the free space alone: a quota shows itself by errors of the
services.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from forge.cli.local_run.presets import Settings

POLL_S = 2.0
_RESERVE_BYTES = 64 << 20
"""Default of the pool's setting, below which it refuses turns."""
_LEAST_BYTES = 1 << 20


def full_below(settings: Settings) -> int:
    """Returns the free bytes below which the pool of a run refuses turns."""
    chosen = settings.get("pool", {}).get("store.disk_reserve_bytes", _RESERVE_BYTES)
    return max(int(chosen), _LEAST_BYTES)


class DiskWatch:
    """Observes the disk of a run's directory."""

    def __init__(self, directory: Path, *, full_below: int, say: Callable[[str], None]) -> None:
        """`full_below`: free bytes below which the disk is full."""
        self._directory = directory
        self._full_below = full_below
        self._say = say
        self._is_full = False

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(POLL_S)

    def look(self) -> None:
        """Says a change."""
        free = shutil.disk_usage(self._directory).free
        if (free < self._full_below) == self._is_full:
            return
        self._is_full = not self._is_full
        if self._is_full:
            self._say(
                f"The disk of {self._directory} is full ({free / (1 << 20):.0f} MiB are free, "
                f"{self._full_below / (1 << 20):.0f} needed): the run waits. Free some space there."
            )
        else:
            self._say(f"The disk of {self._directory} has room again: the run continues.")
