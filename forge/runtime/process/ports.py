"""Free ports for child processes.

They lie below the kernel's range of ephemeral ports, so no other process gets one of them by chance
before the child listens.
"""

from __future__ import annotations

import socket
from random import SystemRandom

_RANGE = range(16_384, 30_000)
"""Above well-known ports, below the ranges of Linux (32,768) and Kubernetes (30,000)."""


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 that are free now."""
    found: list[int] = []
    # Unseeded: concurrent callers must choose different ports.
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
