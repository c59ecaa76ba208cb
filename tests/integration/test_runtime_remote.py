"""Calling "some instance of a kind" while instances fail, refuse, come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from forge.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from forge.runtime.coordination import Coordinator, Registration
from forge.runtime.rpc import Channels, Remote, RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from tests.support.runtime.echo import FULL_NAME, EchoServicer, EchoStub, add_to_server
from tests.support.runtime.waiting import LIMIT_S


@dataclass
class Member:
    servicer: EchoServicer
    server: RpcServer
    registration: Registration


class Kind:
    """Instances of kind "echo" that a test starts and stops."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.security = Security(Keyring.from_bytes(b"k" * 32))
        self.channels = Channels(self.security)
        self.members: list[Member] = []
        self.remote = Remote(coordinator, self.channels, kind="echo", stub=EchoStub)

    async def add(self, name: str, **metadata: str) -> Member:
        servicer = EchoServicer(name)
        server = RpcServer(service="echo", host="127.0.0.1", port=0, security=self.security)
        server.add_service(add_to_server, servicer, full_name=FULL_NAME)
        address = await server.start()
        registration = await self.coordinator.register("echo", name, address, metadata=metadata)
        self.members.append(Member(servicer, server, registration))
        return self.members[-1]

    async def close(self) -> None:
        for member in self.members:
            await member.registration.close()
            await member.server.stop(grace_s=0)
        await self.channels.close()


@pytest_asyncio.fixture
async def kind(coordinator: Coordinator) -> AsyncIterator[Kind]:
    made = Kind(coordinator)
    yield made
    await made.close()


async def ask(kind: Kind, text: str, **options: Any) -> str:
    answer: bytes = await kind.remote.call("Unary", text.encode(), **{"timeout_s": 30.0, **options})
    return answer.decode()


async def test_call_waits_for_the_first_instance(kind: Kind) -> None:
    """Services start in any order: an early caller waits within its time-out."""
    calling = asyncio.create_task(ask(kind, "name"))
    await kind.add("a")
    assert await calling == "a"


async def test_call_without_an_instance_is_unavailable_and_names_the_kind(kind: Kind) -> None:
    """In the error text."""
    with pytest.raises(Unavailable, match="0 of 1 fitting echo instances in cluster '"):
        await ask(kind, "name", timeout_s=0.1)


async def test_calls_are_spread_over_all_instances(kind: Kind) -> None:
    """No instance is left idle."""
    await kind.add("a")
    await kind.add("b")
    await kind.coordinator.discover("echo").wait(count=2, timeout_s=LIMIT_S)
    assert {await ask(kind, "name") for _ in range(50)} == {"a", "b"}


async def test_where_restricts_the_choice(kind: Kind) -> None:
    """For example to the leader."""
    await kind.add("a")
    await kind.add("b", leader="true")
    for _ in range(10):
        answer = await kind.remote.call(
            "Unary", b"name", timeout_s=LIMIT_S, where=lambda one: "leader" in one.metadata
        )
        assert answer == b"b"


async def test_failed_call_is_retried_on_another_instance(kind: Kind) -> None:
    """A caller with retry time does not see one broken instance."""
    broken = await kind.add("broken")
    await kind.add("sound")
    await kind.coordinator.discover("echo").wait(count=2, timeout_s=LIMIT_S)
    broken.servicer.failures = [Unavailable("starting") for _ in range(100)]
    for _ in range(20):
        assert await ask(kind, "name", retry_for_s=LIMIT_S) == "sound"


async def test_call_to_a_stopped_server_is_retried_elsewhere(
    kind: Kind,
) -> None:
    """Between a crash and the end of its lease."""
    gone = await kind.add("gone")
    await kind.add("left")
    await kind.coordinator.discover("echo").wait(count=2, timeout_s=LIMIT_S)
    await gone.server.stop(grace_s=0)
    for _ in range(20):
        assert await ask(kind, "name", retry_for_s=LIMIT_S) == "left"


async def test_overload_is_retried_after_the_hint(kind: Kind) -> None:
    """RESOURCE_EXHAUSTED is retried while there is time."""
    member = await kind.add("a")
    member.servicer.failures = [ResourceExhausted("full", retry_after_s=0.01) for _ in range(3)]
    assert await ask(kind, "name", retry_for_s=LIMIT_S) == "a"
    assert member.servicer.seen == ["name"] * 4


async def test_permanent_error_is_raised_at_once(kind: Kind) -> None:
    """An invalid field stays invalid."""
    member = await kind.add("a")
    with pytest.raises(InvalidArgument, match="told to raise"):
        await ask(kind, "raise:InvalidArgument", retry_for_s=LIMIT_S)
    assert len(member.servicer.seen) == 1


async def test_call_without_retry_time_has_one_attempt(kind: Kind) -> None:
    """Retrying is the caller's decision."""
    member = await kind.add("a")
    member.servicer.failures = [Unavailable("starting")]
    with pytest.raises(Unavailable, match="starting"):
        await ask(kind, "name")
    assert len(member.servicer.seen) == 1


async def test_attempt_without_an_answer_ends_at_its_deadline(kind: Kind) -> None:
    """Every call has a deadline, also to a hung instance."""
    await kind.add("a")
    await kind.coordinator.discover("echo").wait(timeout_s=LIMIT_S)
    with pytest.raises(DeadlineExceeded):
        await ask(kind, "wait", timeout_s=0.3)


async def test_pick_returns_an_instance_and_its_stub(kind: Kind) -> None:
    """Streams choose once and know their instance."""
    await kind.add("a")
    instance, stub = await kind.remote.pick(timeout_s=LIMIT_S)
    assert instance.instance_id == "a"
    answers = [answer async for answer in stub.UnaryStream(b"name say:x", timeout=LIMIT_S)]
    assert answers == [b"a", b"x"]
    assert kind.remote.instances() == (instance,)
