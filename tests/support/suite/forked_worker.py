"""A worker of pytest-xdist, forked from the process that has imported what tests import.

Owns the program that pytest-xdist starts in place of an interpreter:
`python -I -S forked_worker.py -u -c <bootstrap>`. It asks the fork server of the run for a process
with its standard streams, waits for the end of that process and takes its exit code. If this
program is killed, the fork server kills the process. A new interpreter would repeat imports that
all workers have in common.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

ADDRESS = "FORGE_TEST_FORK_SERVER"
MODULE = "tests.support.suite.xdist_worker"


class Spec(Protocol):
    """Of a gateway of execnet."""

    python: str | None


def fork_workers(specs: Sequence[Spec]) -> None:
    """Let workers that are still to be started be forked. `make coverage` starts interpreters,
    which measure from their first import on."""
    if "coverage" in sys.modules:
        return
    for spec in specs:
        spec.python = f"{sys.executable} -I -S {Path(__file__).resolve()}"


def main() -> int:
    """Returns the exit code of the worker."""
    # The terminal's interrupt reaches the worker, too; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(f"\0{os.environ[ADDRESS]}")
    ended, status = os.pipe()
    request = {
        "module": MODULE,
        "argv": [],
        "environ": dict(os.environ),
        "directory": str(Path.cwd()),
    }
    socket.send_fds(channel, [json.dumps(request).encode()], [status, 1, 2, 0])
    for file in (status, 0, 1):
        os.close(file)
    assert channel.recv(16), "the fork server has ended"
    return int(os.read(ended, 16) or 1)


if __name__ == "__main__":
    sys.exit(main() & 255)
