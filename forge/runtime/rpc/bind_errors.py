"""Reasons why a port cannot be bound, and their remedies."""

from __future__ import annotations

import errno
import os
import socket


def bind_error(host: str, port: int) -> OSError | None:
    """The error of a trial to bind a port; None if it can be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return error
    return None


def bind_reason(error: OSError) -> str:
    """The reason alone: asyncio and `socket.create_server` add the address, which the caller
    names. A name without an address has a negative number, and its own text."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return (error.strerror or str(error)).partition(" (while attempting")[0]


def bind_remedy(error: OSError, *, option: str = "") -> str:
    """The remedy. `option`: the flag of the port."""
    if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:
        return "set host to an address of this host, which must be up"
    return f"choose another{f' with {option}' if option else ''}, or 0 for any free one"


def bind_fault(error: OSError, option: str) -> str:
    """The reason and the remedy."""
    return f"{bind_reason(error)}; {bind_remedy(error, option=option)}"
