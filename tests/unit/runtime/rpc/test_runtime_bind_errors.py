"""A port that cannot be bound: the reason has no address, which the error names once."""

from __future__ import annotations

import asyncio
import socket

import pytest

from forge.core.errors import ConfigError
from forge.runtime.rpc import RpcServer
from forge.runtime.rpc.bind_errors import bind_fault, bind_reason
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring

IN_USE = "Address already in use"


async def listen(host: str, port: int) -> None:
    await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)


async def test_reason_of_a_port_in_use_has_no_address() -> None:
    """asyncio and the socket module each put it into the text."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
        with pytest.raises(OSError, match=r"127\.0\.0\.1") as caught:
            await listen(host, port)
        assert bind_reason(caught.value) == IN_USE
        with pytest.raises(OSError, match=r"127\.0\.0\.1") as caught:
            socket.create_server((host, port))
        assert bind_reason(caught.value) == IN_USE


async def test_port_in_use_and_absent_address_have_remedies_of_their_own() -> None:
    """No other port helps if this host does not have the address, or if the name has none."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(OSError, match="in use") as caught:
            await listen(*taken.getsockname())
        assert bind_fault(caught.value, "--port") == (
            f"{IN_USE}; choose another with --port, or 0 for any free one"
        )
    host = "; set host to an address of this host, which must be up"
    with pytest.raises(OSError, match="assign") as caught:
        await listen("192.0.2.1", 0)
    assert bind_fault(caught.value, "--port") == f"Cannot assign requested address{host}"
    unknown = socket.gaierror(-2, "Name or service not known")
    assert bind_fault(unknown, "--port") == f"Name or service not known{host}"


async def test_server_at_an_absent_address_names_the_host() -> None:
    """As the listeners of HTTP and of the metrics."""
    security = Security(Keyring(keys=(b"k" * 32,)), insecure=True)
    server = RpcServer(service="pool", host="192.0.2.1", port=7211, security=security)
    with pytest.raises(ConfigError) as caught:
        await server.start()
    assert str(caught.value) == (
        "pool cannot listen on 192.0.2.1:7211: cannot assign requested address; set host to an "
        "address of this host, which must be up"
    )


def test_reason_of_an_unknown_host_is_its_text() -> None:
    """Its number is that of the resolver, not of the system."""
    error = socket.gaierror(-2, "Name or service not known (while attempting to bind on address x)")
    assert bind_reason(error) == "Name or service not known"
