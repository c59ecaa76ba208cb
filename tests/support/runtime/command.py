"""The `forge` command as a process, forked from one that has imported its modules."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.runtime.service_process import ForkedProcess, can_fork

MODULE = "forge.cli.main"
LIMIT_S = 240.0


async def run_command(
    *words: str, environ: Mapping[str, str] | None = None, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `forge <words>` to its end; `environ` is added to the variables of this process."""
    return await asyncio.to_thread(_run, words, environ or {}, directory)


def _run(
    words: tuple[str, ...], environ: Mapping[str, str], directory: Path | None
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environ}
    if not can_fork(variables):
        argv = [sys.executable, "-m", MODULE, *words]
        return subprocess.run(
            argv, env=variables, cwd=directory, capture_output=True, text=True, timeout=LIMIT_S
        )
    pipe = subprocess.PIPE
    process = ForkedProcess(
        MODULE, words, stdout=pipe, stderr=pipe, environ=variables, directory=directory
    )
    try:
        output, errors = process.communicate(LIMIT_S)
    finally:
        process.kill()
    code = process.wait()
    return subprocess.CompletedProcess(process.args, code, output, errors)
