"""A network with the gateway alone, for a sandboxed program.

Owns the listeners in the network namespace of the program (`namespace_listeners`) and the bytes
between them and the gateway. The namespace needs no route, no name server and no privilege.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Final
from urllib.parse import urlsplit

from forge.agents.launchers import namespace_listeners
from forge.agents.launchers.handover import Handover
from forge.agents.rollout import Gateway
from forge.agents.sandbox.child import last_line, start_turn
from forge.runtime.concurrency import child_start

CONNECTIONS: Final = 64
"""Open connections of one program; more are closed at once."""
_PIECE_BYTES: Final = 1 << 16
_HOSTS: Final = "127.0.0.1 localhost\n::1 localhost\n"

Address = tuple[str, int]


def gateway_addresses(gateway: Gateway) -> list[Address]:
    """Returns host and port of the gateway's HTTP and gRPC."""
    urls = (urlsplit(gateway.http_url), urlsplit(f"//{gateway.grpc_address}"))
    found = [(url.hostname or "", url.port or {"https": 443}.get(url.scheme, 80)) for url in urls]
    return list(dict.fromkeys(found))


def host_names(addresses: list[Address]) -> Mapping[str, str]:
    """Returns the numeric address, inside, of each gateway that is known by a name."""
    return {host: "127.0.0.1" for host, _ in addresses if not _is_numeric(host)}


def hosts_file(addresses: list[Address]) -> str:
    """Returns the content of /etc/hosts inside."""
    names = host_names(addresses).items()
    return _HOSTS + "".join(f"{number} {name}\n" for name, number in names)


@asynccontextmanager
async def gateway_network(
    pid: int, addresses: list[Address], *, directory: str = ""
) -> AsyncIterator[int]:
    """Connects the network namespace of a process with the gateway, until the end of the context.

    Returns the descriptor of `directory` in the root of the process, -1 without one. Raises
    `RuntimeError` with the reason.
    """
    async with AsyncExitStack() as stack:
        descriptors = await _open(pid, addresses, directory)
        opened = descriptors.pop(0) if directory else -1
        if directory:
            stack.callback(os.close, opened)
        for address, descriptor in zip(addresses, descriptors, strict=True):
            listener = socket.socket(fileno=descriptor)
            await stack.enter_async_context(_forward(listener, address))
        yield opened


async def _open(pid: int, addresses: list[Address], directory: str) -> list[int]:
    names = host_names(addresses)
    words = [word for host, port in addresses for word in (names.get(host, host), str(port))]
    with Handover() as handover:
        async with start_turn():
            process = await child_start.start(
                *(sys.executable, "-I", "-S", str(Path(namespace_listeners.__file__))),
                *(str(pid), directory, *words),
                stdin=handover.theirs.fileno(),
                stderr=PIPE,
            )
        handover.started()
        parcel = await handover.receive()
        _, errors = await process.communicate()
    if parcel is None:
        reason = last_line(errors, chars=200, otherwise="the helper ended")
        raise RuntimeError(f"no network to the gateway: {reason}")
    return parcel.descriptors


@asynccontextmanager
async def _forward(listener: socket.socket, address: Address) -> AsyncIterator[None]:
    open_ones: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(open_ones) >= CONNECTIONS:
            writer.close()
            return
        task = asyncio.ensure_future(_connect(reader, writer, address))
        open_ones.add(task)
        task.add_done_callback(open_ones.discard)

    server = await asyncio.start_server(connected, sock=listener)
    try:
        yield
    finally:
        server.close()
        for task in open_ones:
            task.cancel()
        if open_ones:
            await asyncio.wait(open_ones)


async def _connect(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address
) -> None:
    # The program sees a closed connection, as from a gateway that is gone.
    with suppress(OSError):
        try:
            gateway, to_gateway = await asyncio.open_connection(*address)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_copy(reader, to_gateway))
                    both.create_task(_copy(gateway, writer))
            except* OSError:
                pass
            finally:
                to_gateway.close()
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
