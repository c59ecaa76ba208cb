"""Runs a command beside busy processes: `python -m tests.support.suite.loaded <command> ...`.

Shows that no test depends on how fast the machine is: `make test-loaded`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from forge.runtime.process.child_processes import dying_with_parent

BUSY = 16


def main(command: Sequence[str]) -> int:
    """Returns the exit code of the command; the busy processes end with this one."""
    spin = dying_with_parent([sys.executable, "-c", "while True: pass"])
    busy = [subprocess.Popen(spin) for _ in range(BUSY)]
    try:
        return subprocess.run(dying_with_parent(command)).returncode
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
