"""Ports of this machine's own, chosen for a process that is started with them.

Between the choice and the process that listens, others listen at "any free port" and connect: what
they get is of the kernel's own range, below which we keep.
"""

from __future__ import annotations

import socket
from random import SystemRandom

_RANGE = range(16_384, 30_000)
"""Above what is known for something, below what Linux gives (32,768) and Kubernetes (30,000)."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago, all different."""
    found: list[int] = []
    # Not by a seed: who chooses at the same time shall not choose the same.
    choice = SystemRandom()
    while len(found) < count:
        port = choice.choice(_RANGE)
        if port not in found and _free(port):
            found.append(port)
    return found


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
