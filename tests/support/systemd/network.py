"""A network of bare hosts: a bridge in a network namespace of its own. Needs root and `iproute2`.

The namespace ends with this process, also after SIGKILL, and takes bridge and links along.
"""

from __future__ import annotations

import subprocess

from forge.runtime.process.child_processes import dying_with_parent

BRIDGE = "forge0"


class Network:
    """One bridge. `enter` are the words that run a command in its namespace."""

    bridge = BRIDGE

    def __init__(self) -> None:
        made = f"ip link add {BRIDGE} type bridge && ip link set {BRIDGE} up && echo up"
        self._holder = subprocess.Popen(
            dying_with_parent(
                ["/usr/bin/unshare", "--net", "sh", "-c", f"{made} && exec sleep infinity"]
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n"
        self.enter = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]

    def close(self) -> None:
        """End the namespace."""
        self._holder.kill()
        self._holder.communicate()
