"""Starts a module on several ranks, as an operator does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def torchrun(ranks: int, module: str, *arguments: str, timeout_s: float = 900) -> Any:
    """The JSON value in the last line that the ranks print."""
    command = ("--standalone", "--nproc-per-node", str(ranks), "-m", module, *arguments)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return json.loads(run.stdout.splitlines()[-1])
