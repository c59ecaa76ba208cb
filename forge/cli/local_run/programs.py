"""Programs of Forge that a command runs to their end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress


async def run_module(
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    quiet: bool = False,
    python: str = sys.executable,
) -> tuple[int, str]:
    """Returns the exit code of `python -m`; with `quiet` also its stderr, and drops its stdout.

    A cancel kills the process and its children.
    """
    process = _start((python, "-m", module, *arguments), env, quiet=quiet)
    end = asyncio.create_task(asyncio.to_thread(process.communicate))
    try:
        _, errors = await asyncio.shield(end)
    finally:
        if not end.done():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await end
    return process.returncode, errors or ""


def _start(command: Sequence[str], env: Mapping[str, str], *, quiet: bool) -> subprocess.Popen[str]:
    """Not one of asyncio's subprocesses: a Ctrl-C while one starts prints a warning."""
    return subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        # Without the parent's Ctrl-C, to which the process would react with a traceback.
        start_new_session=True,
    )
