"""Reasons why a port cannot be bound."""

from __future__ import annotations

import errno
import os


def bind_reason(error: OSError) -> str:
    """The reason alone: asyncio and `socket.create_server` add the address, which the caller
    names. A name without an address has a negative number, and its own text."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return (error.strerror or str(error)).partition(" (while attempting")[0]


def bind_fault(error: OSError, option: str) -> str:
    """The reason and the remedy. `option`: the flag of the port."""
    if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:
        return f"{bind_reason(error)}; set host to an address of this host, which must be up"
    return f"{bind_reason(error)}; choose another with {option}, or 0 for any free one"
