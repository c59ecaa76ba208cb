"""Wait for the first of several tasks; end tasks."""

from __future__ import annotations

import asyncio

import pytest

from forge.runtime.concurrency import tasks
from forge.runtime.concurrency.tasks import cancel_and_wait, first_done


async def test_first_task_is_returned_and_the_others_are_cancelled() -> None:
    """Of a task and a coroutine; a shielded future survives."""
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(asyncio.Event().wait())
    first = asyncio.create_task(asyncio.sleep(0, result=3))
    (done,) = await first_done(task, first, asyncio.shield(never))
    assert done is first
    assert done.result() == 3
    await asyncio.wait({task})
    assert task.cancelled()
    assert not never.done()


async def test_error_stays_in_its_task() -> None:
    """A failed task counts as ended; the caller reads its error."""

    async def fail() -> None:
        raise ValueError("broken")

    (done,) = await first_done(fail(), asyncio.Event().wait())
    with pytest.raises(ValueError, match="broken"):
        await done


async def test_cancelled_wait_cancels_all_tasks() -> None:
    """No task outlives its waiter."""
    task = asyncio.create_task(asyncio.Event().wait())
    waiter = asyncio.create_task(first_done(task))
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.wait({task, waiter})
    assert task.cancelled()


async def test_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    """A gRPC stream may raise its own error instead; the task would go on forever."""
    lost = asyncio.Event()

    async def lose_one() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(lose_one())
    await asyncio.sleep(0)
    await cancel_and_wait(None, task)
    assert lost.is_set()
    assert task.cancelled()


async def test_end_of_a_task_is_not_cancelled_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may remove a container, or write to another process."""
    monkeypatch.setattr(tasks, "_REPEAT_S", 0.01)
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            ended = True

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await cancel_and_wait(task, repeat_s=60.0)
    assert ended
