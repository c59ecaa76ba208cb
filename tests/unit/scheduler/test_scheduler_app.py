"""An instance through its elections."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forge.runtime.coordination import Versioned
from services.scheduler import app, term
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.scheduler.state import TermState
from tests.support.scheduler_term import FakeShards


class Office:
    """Leadership that a test ends."""

    fence = 1

    def __init__(self) -> None:
        self.alive = True
        self.over = asyncio.Event()

    async def lost(self) -> None:
        await self.over.wait()

    async def resign(self) -> None:
        self.alive = False


class Coordinator:
    """Elects whoever stands when a test says so, and keeps one key."""

    def __init__(self) -> None:
        self.offices: asyncio.Queue[Office] = asyncio.Queue()
        self.stored: Versioned | None = None
        self.stood = 0

    def discover(self, kind: str) -> None:
        return None

    async def campaign(self, *_: Any, **__: Any) -> Office:
        self.stood += 1
        return await self.offices.get()

    async def get(self, key: str) -> Versioned | None:
        return self.stored

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        self.stored = Versioned(value=value, mod_revision=expected_revision + 1)
        return self.stored.mod_revision


class Shards(FakeShards):
    """Whoever scans or leads has these, and none of them comes or goes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    async def changed(self) -> None:
        await asyncio.Event().wait()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.01)


async def test_deposed_leader_has_let_its_queue_go_when_it_stands_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be a million groups, and now the copies of a standby take their place."""
    states: list[weakref.ref[TermState]] = []

    class Watched(TermState):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            states.append(weakref.ref(self))

    async def announce() -> None: ...

    monkeypatch.setattr(term, "TermState", Watched)
    monkeypatch.setattr(app, "_PAUSE_S", 0.0)
    for name in ("ShardScans", "PoolShards"):
        monkeypatch.setattr(app, name, Shards)
    coordinator = Coordinator()
    context = SimpleNamespace(
        config=SchedulerConfig(etcd="etcd:2379"),
        coordinator=coordinator,
        remote=lambda *_: None,
        security=SimpleNamespace(keyring=None),
        server=SimpleNamespace(add=lambda *_, **__: None),
        metadata={},
        announce=announce,
    )
    instance = SchedulerApp(context)
    await instance.start()
    office = Office()
    coordinator.offices.put_nowait(office)
    await until(lambda: context.metadata["leader"] == "true")
    assert states[0]() is not None
    office.over.set()
    await until(lambda: coordinator.stood == 2)
    assert states[0]() is None
    await instance.stop()
