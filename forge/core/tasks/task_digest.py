"""The digest of a submitted task. The scheduler stores it with the group."""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol


class Message(Protocol):
    """A `forge.v1.Task`."""

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:  # noqa: N802
        """Return the encoded message."""
        ...


def task_digest(task: Message) -> bytes:
    """Return 16 bytes, equal for equal tasks. They distinguish a repeated submission from an id
    conflict."""
    return blake2b(task.SerializeToString(deterministic=True), digest_size=16).digest()
