"""Descriptors that a child sends to the runner over a socket.

Owns the pair of sockets. The pid of the sender comes with them, as the runner sees it.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from dataclasses import dataclass, field
from types import TracebackType

_MOST = 16
"""Descriptors of one message."""


@dataclass(slots=True, kw_only=True)
class Parcel:
    """One message with descriptors; its owner closes them."""

    pid: int = 0
    descriptors: list[int] = field(default_factory=list)


class Handover:
    """A socket of the runner, and the one for the child."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def __enter__(self) -> Handover:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ours.close()
        self.theirs.close()

    def started(self) -> None:
        """The child has its socket: its end is then visible as an end of file."""
        self.theirs.close()

    async def receive(self) -> Parcel | None:
        """Returns the next message; None when the child has ended without one."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ours.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._ours.fileno())
        size = socket.CMSG_SPACE(4 * _MOST) + socket.CMSG_SPACE(12)
        message, ancillary, _, _ = self._ours.recvmsg(1, size)
        parcel = Parcel()
        for _level, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                numbers = array.array("i", content[: len(content) // 4 * 4])
                parcel.descriptors += numbers
            elif kind == socket.SCM_CREDENTIALS:
                (parcel.pid, _, _) = struct.unpack("3i", content)
        if message:
            return parcel
        for descriptor in parcel.descriptors:
            os.close(descriptor)
        return None

    def reply(self) -> None:
        """Lets the child continue."""
        self._ours.send(b"+")
