"""A second worker that decodes, beside those of a `forge run`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.suite.forge_run import ForgeRun

SECOND = "decode-2"
"""Its instance id."""


@contextmanager
def second_worker(run: ForgeRun, *settings: str, python: str = sys.executable) -> Iterator[None]:
    """A copy of the run's worker, which its supervisor does not know; killed at the end."""
    started = json.loads((run.directory / "processes.json").read_text())["decode"]
    flags = [
        one.replace("--instance-id=decode", f"--instance-id={SECOND}") for one in started["flags"]
    ]
    with (run.directory / "logs" / f"{SECOND}.log").open("ab") as log:
        process = subprocess.Popen(
            [python, "-m", started["module"], *flags, *settings], stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()
