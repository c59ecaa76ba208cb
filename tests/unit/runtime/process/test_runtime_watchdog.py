"""The watchdog of systemd is fed while the actors handle their messages, and only then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.process.watchdog import ends_unit, feed_watchdog, limit_s
from tests.support.runtime.actors import Gate

LIMIT_S = 0.03


class Beats:
    """A systemd that waits for beats."""

    def __init__(self) -> None:
        self.states: asyncio.Queue[str] = asyncio.Queue()

    def notify(self, state: str) -> None:
        self.states.put_nowait(state)


@pytest_asyncio.fixture
async def system() -> AsyncIterator[ActorSystem]:
    """An actor system that is stopped after the test."""
    made = ActorSystem("test")
    yield made
    await made.stop()


async def test_watchdog_stops_while_an_actor_handles_no_message(system: ActorSystem) -> None:
    """Messages that wait longer than the limit stop the beats; the next handled message restarts
    them."""
    gate = Gate()
    ref = await system.spawn(lambda: gate, name="gate")
    beats = Beats()
    feeding = asyncio.create_task(feed_watchdog(beats, system, LIMIT_S))
    assert await beats.states.get() == "WATCHDOG=1"
    ref.tell("handled for long")
    await gate.entered.wait()
    ref.tell("waiting")
    while not system.stalled(LIMIT_S):
        await asyncio.sleep(0)
    assert system.stalled(LIMIT_S) == ["gate"]
    assert system.stalled(3600.0) == []
    while not beats.states.empty():
        beats.states.get_nowait()
    # Real time: three rounds of the feeder, all of them without a beat.
    await asyncio.sleep(LIMIT_S)
    assert beats.states.empty()
    gate.open.set()
    assert await beats.states.get() == "WATCHDOG=1"
    assert system.stalled(LIMIT_S) == []
    feeding.cancel()


async def test_idle_actor_is_not_stalled(system: ActorSystem) -> None:
    """Without waiting messages, for any time."""
    await system.spawn(Gate, name="gate")
    assert system.stalled(0.001) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "180000000"}, 180.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": str(os.getpid())}, 180.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": "1"}, 0.0),
    ],
)
def test_watchdog_limit_applies_to_the_process_of_the_unit(
    environ: dict[str, str], expected: float
) -> None:
    """A child that inherits the variables has no watchdog."""
    assert limit_s(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"SYSTEMD_EXEC_PID": str(os.getpid())}, True),
        ({"SYSTEMD_EXEC_PID": "1"}, False),
    ],
)
def test_unit_ends_with_its_own_process(environ: dict[str, str], expected: bool) -> None:
    """And with that of a supervisor that is no systemd."""
    assert ends_unit(environ) == expected
