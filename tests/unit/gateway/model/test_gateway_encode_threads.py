"""The queue before the threads: a call that leaves it, at any moment, takes no thread along."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from services.gateway.model.encode_threads import EncodeThreads

WAIT_S = 60.0


class Executor:
    """Threads whose work ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Future[Any]] = []

    def submit(self, *_: Any) -> Future[Any]:
        self.begun.append(Future())
        return self.begun[-1]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def later(steps: int, action: Callable[[], object]) -> None:
    """Acts after so many steps of the event loop."""
    loop = asyncio.get_running_loop()
    loop.call_soon(action if not steps else lambda: later(steps - 1, action))


@pytest.mark.parametrize("steps", range(5))
async def test_call_that_is_cancelled_as_its_turn_comes_frees_the_thread(steps: int) -> None:
    """The agent leaves as another call ends, in the same step of the event loop or beside it."""
    threads, executor = EncodeThreads(1), Executor()
    threads._executor = executor  # type: ignore[assignment]
    calls = []
    for tenant in "abc":
        calls.append(asyncio.create_task(threads.run(tenant, lambda: None)))
        await settled()
    first, leaving, staying = calls
    assert (len(executor.begun), threads.queued) == (1, 2)
    later(0, lambda: executor.begun[0].set_result(None))
    later(steps, leaving.cancel)
    await settled()
    for work in executor.begun[1:]:
        work.set_result(None)
    await settled()
    assert first.done() and leaving.cancelled()
    for work in executor.begun[2:]:
        if not work.done():
            work.set_result(None)
    await asyncio.wait_for(staying, WAIT_S)
    last = asyncio.create_task(threads.run("b", lambda: None))
    await settled()
    executor.begun[-1].set_result(None)
    await asyncio.wait_for(last, WAIT_S)
