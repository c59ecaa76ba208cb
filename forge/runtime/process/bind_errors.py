"""Reasons why a port cannot be bound."""

from __future__ import annotations

import os


def bind_reason(error: OSError) -> str:
    """The reason alone: asyncio and `socket.create_server` add the address, which the caller
    names. A name without an address has a negative number, and its own text."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return (error.strerror or str(error)).partition(" (while attempting")[0]
