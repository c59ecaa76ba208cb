"""The lines of a run about its full disk."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge.cli.local_run import disk_watch
from forge.cli.local_run.disk_watch import DiskWatch, full_below
from services.pool.config import StoreSettings

RESERVE_BYTES = StoreSettings().disk_reserve_bytes


async def test_full_disk_and_its_end_are_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the directory, however many looks find the same; again after a return."""
    free = iter([RESERVE_BYTES, 3 << 20, 0, RESERVE_BYTES, RESERVE_BYTES + 1, 0])
    said: list[str] = []
    ended = asyncio.Event()

    def usage(path: Path) -> SimpleNamespace:
        assert path == tmp_path
        found = next(free, None)
        if found is None:
            ended.set()
        return SimpleNamespace(free=found or 0)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(disk_watch, "POLL_S", 0)
    watch = DiskWatch(tmp_path, full_below=RESERVE_BYTES, say=said.append)
    running = asyncio.create_task(watch.run())
    await ended.wait()
    running.cancel()
    assert said == [
        f"The disk of {tmp_path} is full (3 MiB are free, 64 needed): the run waits. Free some "
        "space there.",
        f"The disk of {tmp_path} has room again: the run continues.",
        f"The disk of {tmp_path} is full (0 MiB are free, 64 needed): the run waits. Free some "
        "space there.",
    ]


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, RESERVE_BYTES),
        ({"pool": {"store.disk_reserve_bytes": "8000000"}}, 8_000_000),
        ({"pool": {"store.disk_reserve_bytes": "0"}}, 1 << 20),
    ],
)
def test_disk_is_full_when_the_pool_refuses_turns(
    settings: dict[str, dict[str, str]], needed: int
) -> None:
    """By its setting, or when nothing can be written."""
    assert full_below(settings) == needed
