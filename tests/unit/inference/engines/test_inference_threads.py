"""Threads of engines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.inference.engines.threads import run_detached
from tests.support.runtime.waiting import LIMIT_S

HANGING = """
import asyncio
from threading import Event
from services.inference.engines.threads import run_detached

async def hang():
    async with asyncio.timeout(0.01):
        await run_detached(Event().wait, name="hanging")

asyncio.run(hang())
"""


def test_thread_that_hangs_does_not_delay_the_end_of_the_process() -> None:
    """A library that does not shut down would keep a worker that has failed."""
    ended = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("TimeoutError\n")


async def test_detached_function_returns_and_raises() -> None:
    """As on the caller's thread."""
    assert await run_detached(lambda: 3, name="return") == 3
    with pytest.raises(ZeroDivisionError):
        await run_detached(lambda: 1 / 0, name="raise")
