"""Many programs at once start one after the other, and the event loop turns between them."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from forge.agents.launchers.bare import BareLauncher
from forge.agents.launchers.base import Launcher, ProgramLimits, Request
from forge.agents.launchers.wrapped import SandboxLauncher
from forge.agents.rollout import Gateway
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.runtime.concurrency import child_start
from tests.support.agents.scripted_gateway import ScriptedGateway, replay, text
from tests.support.agents.tasks import rollout

STARTS = 12
LIMITS = ProgramLimits(memory_bytes=0, processes=0)


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def launcher_of(kind: str) -> Launcher:
    if kind == "host":
        return BareLauncher(LIMITS)
    sandbox = await ProcessSandbox(tmp_bytes=LIMITS.tmp_bytes).fitted()
    if problem := await sandbox.problem():
        pytest.skip(problem)
    return SandboxLauncher(sandbox, limits=LIMITS)


def request(gateway: Gateway) -> Request:
    return Request(words=[sys.executable, "-c", ""], variables={}, inherited={}, gateway=gateway)


@pytest.mark.parametrize("kind", ["host", "bubblewrap"])
async def test_the_event_loop_turns_between_two_starts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two processes start in one turn, and no file system is looked up on the loop's thread."""
    launcher = await launcher_of(kind)
    turns, started_at, threads = Turns(), list[int](), set[int]()
    start, mounts = child_start.start, ProcessSandbox._mounts

    async def counted(*words: Any, **options: Any) -> Any:
        started_at.append(turns.count)
        return await start(*words, **options)

    def observed(self: ProcessSandbox, contents: Any) -> Any:
        threads.add(threading.get_ident())
        return mounts(self, contents)

    monkeypatch.setattr(child_start, "start", counted)
    monkeypatch.setattr(ProcessSandbox, "_mounts", observed)
    async with ScriptedGateway(replay(text("4"))) as scripted:
        asked = request(rollout(scripted).gateway)

        async def run_once() -> None:
            async with launcher.start(asked) as program:
                await program.process.wait()

        counting = asyncio.create_task(turns.run())
        await asyncio.gather(*(run_once() for _ in range(STARTS)))
        counting.cancel()
        with suppress(asyncio.CancelledError):
            await counting
    assert len(started_at) >= STARTS
    assert len(set(started_at)) == len(started_at)
    assert threading.get_ident() not in threads
