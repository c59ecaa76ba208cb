"""Tasks that run as long as their process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from forge.runtime.process.service import ServiceContext


def context_of(failures: list[tuple[str, BaseException]]) -> ServiceContext:
    nothing: Any = None
    return ServiceContext(
        config=nothing,
        security=nothing,
        coordinator=nothing,
        channels=nothing,
        actors=nothing,
        server=nothing,
        fail=lambda name, error: failures.append((name, error)),
    )


async def returns() -> None:
    pass


async def breaks() -> None:
    raise ValueError("broken")


@pytest.mark.parametrize(("work", "reason"), [(returns, "it has returned"), (breaks, "broken")])
async def test_process_fails_when_a_kept_task_ends(work: Any, reason: str) -> None:
    """Also without an error: its work would be missing."""
    failures: list[tuple[str, BaseException]] = []
    context = context_of(failures)
    kept: Coroutine[Any, Any, None] = work()
    context.keep_running(kept, name="sweep")
    for _ in range(3):  # it runs, it ends, its end is reported
        await asyncio.sleep(0)
    ((name, error),) = failures
    assert (name, str(error)) == ("sweep", reason)
    await context.undo.aclose()


async def test_kept_tasks_end_with_the_process() -> None:
    """The last one first, and none is a failure."""
    failures: list[tuple[str, BaseException]] = []
    ended: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    context = context_of(failures)
    for name in ("first", "second"):
        context.keep_running(work(name), name=name)
    await asyncio.sleep(0)
    await context.undo.aclose()
    assert (ended, failures) == (["second", "first"], [])
