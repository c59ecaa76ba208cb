"""Services that a benchmark starts beside itself, and that end with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forge.runtime.process.child_processes import dying_with_parent


def started(module: str, folder: Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    """`python -m module` with these flags, named and logging like the last part of the module."""
    name = module.rpartition(".")[2]
    argv = [sys.executable, "-m", module, *flags, "--instance-id", name]
    argv += ["--log-level", "warning", "--log-file", str(folder / f"{name}.log")]
    return subprocess.Popen(dying_with_parent(argv))


def ended(process: subprocess.Popen[bytes]) -> None:
    """Killed, and gone."""
    process.kill()
    process.wait()
