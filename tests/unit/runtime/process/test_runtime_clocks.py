"""Clocks of real servers, read over gRPC, and what a process says when its own is off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio

from forge.core.clocks import Clock
from forge.runtime.coordination import Instance
from forge.runtime.process import clock_watch
from forge.runtime.process.clock_watch import ClockWatch, read_clocks
from forge.runtime.process.service import CLOCK_OFFSET_KEY, ServiceContext
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring

KEYRING = Keyring.from_bytes(b"k" * 32)


def instance(name: str, address: str) -> Instance:
    return Instance(kind="pool", instance_id=name, address=address, metadata={}, revision=0)


@pytest_asyncio.fixture
async def address() -> AsyncIterator[str]:
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=Security(KEYRING))
    yield await server.start()
    await server.stop(grace_s=0)


async def test_clock_is_read_from_a_response_that_refuses_the_token(address: str) -> None:
    """Another cluster's token does not hide it; an absent instance is left out."""
    channels = Channels(Security(Keyring.from_bytes(b"x" * 32), subject="stranger"))
    gone = instance("gone", "127.0.0.1:1")
    (clock,) = await read_clocks(channels, [instance("a", address), gone])
    assert clock.name == f"a at {address}"
    assert abs(clock.offset_s) <= clock.error_s + 1
    await channels.close()


class Cluster:
    """Of three instances, the first of which watches."""

    def __init__(self) -> None:
        self.instances = [instance(name, f"{name}:1") for name in "abc"]
        self.offsets_s = {"b:1": 0.0, "c:1": 0.0}
        self.shown: list[float | None] = []
        self.watch = ClockWatch(
            cast(Any, self), cast(Any, None), own=self.instances[0], on_offset=self._show
        )

    async def all_instances(self) -> list[Instance]:
        return self.instances

    async def _show(self, offset_s: float | None) -> None:
        self.shown.append(offset_s)

    async def read(self, channels: Any, instances: list[Instance]) -> list[Clock]:
        return [
            Clock(name=clock_watch.clock_name(one), offset_s=self.offsets_s[one.address])
            for one in instances
        ]


async def test_process_shows_its_own_clock_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the median of all; a peer with a wrong clock does not count against it."""
    cluster = Cluster()
    monkeypatch.setattr(clock_watch, "read_clocks", cluster.read)
    await cluster.watch.look()
    cluster.offsets_s = {"b:1": -7200.0, "c:1": -7200.0}
    await cluster.watch.look()
    cluster.offsets_s = {"b:1": 0.0, "c:1": -7200.0}
    await cluster.watch.look()
    assert cluster.shown == [None, 7200.0, None]


class Registration:
    def __init__(self) -> None:
        self.written: list[dict[str, str]] = []

    async def update(self, metadata: dict[str, str]) -> None:
        self.written.append(dict(metadata))


async def test_clock_offset_is_written_when_it_changes() -> None:
    """Measurements that vary by less than a second cause no write to etcd."""
    registration = Registration()
    nothing: Any = None
    context = ServiceContext(
        config=nothing,
        security=nothing,
        coordinator=nothing,
        channels=nothing,
        actors=nothing,
        server=nothing,
        registration=cast(Any, registration),
    )
    for offset_s in (None, 7200.2, 7200.4, 7300.0, None, None):
        await context.announce_clock_offset(offset_s)
    written = [metadata.get(CLOCK_OFFSET_KEY) for metadata in registration.written]
    assert written == ["+7200", "+7300", None]
