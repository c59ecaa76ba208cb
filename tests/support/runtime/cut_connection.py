"""A network that stalls and cuts connections: the port of another loopback address, forwarded.

A service listens on 127.0.0.1 and advertises 127.0.0.2, so that its callers come this way.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

ADDRESS = "127.0.0.2"
_READ_BYTES = 4096


class CuttingProxy:
    """Forwards connections; `stall_next` stalls one."""

    def __init__(self) -> None:
        self.port = 0
        """From `start` on."""
        self._to_port = 0
        self.answered_bytes: list[int] = []
        """Bytes to the caller, for each connection."""
        self.stalled = -1
        """Number of the stalled connection."""
        self._stall_after: int | None = None
        self._cut = asyncio.Event()
        self._callers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self, *, to_port: int = 0) -> None:
        """Listen on a port that the system chooses; 0: a service will listen on the same one."""
        self._server = await asyncio.start_server(self._forward, ADDRESS, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._to_port = to_port or self.port

    def stall_next(self, *, after_bytes: int) -> None:
        """Forward no more on the first new connection whose caller has got so many bytes."""
        self._stall_after = after_bytes

    def cut(self) -> None:
        """Abort the stalled connection."""
        self._cut.set()

    def cut_all(self) -> None:
        """Abort every connection."""
        for writer in self._callers:
            writer.transport.abort()

    async def close(self) -> None:
        """Accept no more; connections end with their peers."""
        assert self._server is not None
        self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        may_stall = self._stall_after is not None
        number = len(self.answered_bytes)
        self.answered_bytes.append(0)
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        self._callers.add(writer)
        asking = asyncio.create_task(_copy(reader, ours))
        with suppress(OSError):
            while data := await theirs.read(_READ_BYTES):
                self.answered_bytes[number] += len(data)
                if may_stall and self._stalls(number):
                    await self._cut.wait()
                    break
                if writer.is_closing():
                    break  # `cut_all`, while the data came.
                writer.write(data)
                await writer.drain()
        asking.cancel()
        self._callers.discard(writer)
        for transport in (writer.transport, ours.transport):
            transport.abort()

    def _stalls(self, number: int) -> bool:
        after = self._stall_after
        if after is None or self.answered_bytes[number] <= after:
            return False
        self.stalled, self._stall_after = number, None
        return True


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
