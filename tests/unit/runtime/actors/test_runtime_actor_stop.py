"""The end of an actor: its messages, its start, its back-off and the order of a system."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forge.core.errors import (
    ActorStopped,
)
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.actors.supervision import Restart
from tests.support.runtime.actors import Crash, Double, Doubler, Gate

AT_ONCE = Restart(max_restarts=3, backoff_s=0.0)


async def test_stop_finishes_the_current_message_and_answers_the_others(
    system: ActorSystem,
) -> None:
    """Every pending ask has an answer after stop, and no other message is handled."""
    gate = Gate()
    ref = await system.spawn(lambda: gate, name="gate")
    in_hand = asyncio.create_task(ref.ask("in hand", timeout_s=30))
    await gate.entered.wait()
    waiting = asyncio.create_task(ref.ask("waiting", timeout_s=30))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(ref.stop())
    with pytest.raises(ActorStopped):
        await waiting
    gate.open.set()
    await stopping
    assert await in_hand == "in hand"
    assert gate.seen == ["in hand"]


async def test_stop_cancels_a_message_that_takes_too_long(system: ActorSystem) -> None:
    """After its time-out; that caller gets an answer too."""
    gate = Gate()
    ref = await system.spawn(lambda: gate, name="gate")
    stuck = asyncio.create_task(ref.ask("stuck", timeout_s=30))
    await gate.entered.wait()
    await ref.stop(timeout_s=0.01)
    with pytest.raises(ActorStopped, match="in mid-message"):
        await stuck


async def test_stop_during_a_start_is_raised_to_the_spawner(system: ActorSystem) -> None:
    """The spawner does not wait for an actor that will never exist."""

    class Slow(Doubler):
        async def started(self) -> None:
            await asyncio.Event().wait()

    spawning = asyncio.create_task(system.spawn(Slow, name="slow"))
    await asyncio.sleep(0)
    await system.stop(timeout_s=0.01)
    with pytest.raises(ActorStopped, match="slow was stopped in its start"):
        await asyncio.wait_for(spawning, 30)


async def test_stop_ends_a_back_off_at_once(system: ActorSystem) -> None:
    """A stopping actor does not wait for the pause before a restart."""
    ref = await system.spawn(Doubler, name="a", restart=Restart(backoff_s=300, max_backoff_s=300))
    with pytest.raises(KeyError):
        await ref.ask(Crash(), timeout_s=30)
    waiting = asyncio.create_task(ref.ask(Double(1), timeout_s=30))
    await asyncio.sleep(0)
    await asyncio.wait_for(ref.stop(), 30)
    with pytest.raises(ActorStopped):
        await waiting


async def test_actor_may_stop_itself(system: ActorSystem) -> None:
    """Stop inside receive closes the mailbox and does not wait for its own end."""

    class Suicidal(Actor):
        async def receive(self, message: Any) -> Any:
            await ref.stop()
            return "done"

    ref = await system.spawn(Suicidal, name="a")
    assert await ref.ask("go", timeout_s=30) == "done"
    with pytest.raises(ActorStopped):
        ref.tell("more")


async def test_system_stops_the_youngest_actor_first(system: ActorSystem) -> None:
    """A later actor may depend on an earlier one, never the other way round."""
    order: list[str] = []

    class Last(Actor):
        def __init__(self, name: str) -> None:
            self.name = name

        async def stopped(self) -> None:
            order.append(self.name)

    for name in ("store", "writer", "servicer"):
        await system.spawn(lambda name=name: Last(name), name=name)  # type: ignore[misc]
    await system.stop()
    assert order == ["servicer", "writer", "store"]
