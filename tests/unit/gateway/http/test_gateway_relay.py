"""Calls of external APIs in their session."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.security.tokens import Claims
from services.gateway.actors.messages import IsBusy, StartClose
from services.gateway.actors.session import SessionActor
from services.gateway.conversation.agent_time import Moment
from services.gateway.http.relay import Relay
from tests.support.gateway.session_settings import session_settings

CLAIMS = Claims(subject="t:0:0", scopes=frozenset({"session"}), trajectory_id="t:0:0")
TIMEOUT_S = 60.0


class Surroundings(ActorRef):
    """The pool, which answers when the test allows it, and a writer without turns."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def fetch(self, _: Claims) -> None:
        self.asked.set()
        await self.may_answer.wait()

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        return []


async def test_agent_that_leaves_while_its_call_begins_does_not_block_the_close() -> None:
    """The session reads the pool before its first call, and begins the call afterwards."""
    around, system = Surroundings(), ActorSystem("test")
    settings = session_settings(around, fetch=around.fetch)
    actor = await system.spawn(lambda: SessionActor(CLAIMS, settings), name="session")
    session: Any = SimpleNamespace(actor=actor)
    api: Any = SimpleNamespace(timeout_s=TIMEOUT_S, name="judge")
    relay = Relay(session, api, b"{}", path="/v1/x", arrived=Moment(at_s=0.0, unix_s=1e6))
    call = asyncio.create_task(relay.begin())
    await around.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    around.may_answer.set()
    close = StartClose(agent_ended=Moment(at_s=1.0, unix_s=1e6 + 1))
    drained = cast(asyncio.Future[None], await actor.ask(close, timeout_s=TIMEOUT_S))
    assert not await actor.ask(IsBusy(), timeout_s=TIMEOUT_S)
    assert drained.done()
    await system.stop()
