"""Channels without calls are closed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from forge.runtime.rpc import Channels, RpcServer
from forge.runtime.rpc.channel import IDLE_S
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from tests.support.runtime.echo import FULL_NAME, SCOPES, EchoServicer, EchoStub, add_to_server
from tests.support.runtime.waiting import until


async def test_idle_channels_retire_when_another_opens() -> None:
    """Each restart of a peer has a new address. Calls in flight end on the old channel; a stub that
    its user has kept opens another, which is in use again."""
    now_s, security, servicer = 0.0, Security(Keyring.from_bytes(b"k" * 32)), EchoServicer()
    server = RpcServer(service="echo", host="127.0.0.1", port=0, security=security)
    server.add_service(add_to_server, servicer, full_name=FULL_NAME, scopes=SCOPES)
    address = await server.start()
    channels = Channels(security, clock=lambda: now_s)
    stub: Any = channels.stub(EchoStub, address)
    channel: Any = channels.get(address)
    waiting = asyncio.ensure_future(stub.Unary(b"wait", timeout=60))
    await servicer.entered.wait()
    now_s += IDLE_S + 1
    channels.get("127.0.0.1:1")
    assert channel._inner is None and channel.has_calls()
    servicer.gate.set()
    assert await waiting == b"waited"
    await until(lambda: not channel.has_calls())
    channels.get("127.0.0.1:2")
    assert list(channels._channels) == ["127.0.0.1:1", "127.0.0.1:2"]
    assert await stub.Unary(b"say:again", timeout=30) == b"again"
    assert channels.get(address) == channel and address in channels._channels
    now_s += IDLE_S + 1
    channels.get("127.0.0.1:3")
    await until(lambda: not channel.has_calls())
    channels.get("127.0.0.1:4")
    stub = channel = None
    gc.collect()
    assert address not in channels._known
    await channels.close()
    await server.stop(grace_s=0)


async def test_open_streams_outlive_their_idle_channel() -> None:
    """Also a stream without a message for hours, such as that to a router."""
    now_s, security, servicer = 0.0, Security(Keyring.from_bytes(b"k" * 32)), EchoServicer()
    server = RpcServer(service="echo", host="127.0.0.1", port=0, security=security)
    server.add_service(add_to_server, servicer, full_name=FULL_NAME, scopes=SCOPES)
    channels = Channels(security, clock=lambda: now_s)
    address = await server.start()
    streams = [channels.stub(EchoStub, address).StreamStream() for _ in range(2)]
    for stream in streams:
        await stream.write(b"say:before")
        assert await stream.read() == b"before"
    reading = asyncio.ensure_future(streams[0].read())
    now_s += IDLE_S + 1
    channels.get("127.0.0.1:1")
    channel: Any = channels.get(address)
    await until(lambda: channel.has_calls())
    for stream in streams:
        await stream.write(b"say:after")
    assert [await reading, await streams[1].read()] == [b"after", b"after"]
    await channels.close()
    await server.stop(grace_s=0)
