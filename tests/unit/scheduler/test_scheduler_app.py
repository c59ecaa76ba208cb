"""An instance through its elections."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from forge.core.errors import Unavailable
from forge.runtime.concurrency import tasks
from forge.runtime.coordination import Versioned
from forge.v1 import pool_pb2
from services.scheduler import app
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership import term
from services.scheduler.shards.pool_shards import Floors
from services.scheduler.state.term_state import TermState
from services.scheduler.term_record import TERM_KEY
from tests.support.runtime.waiting import until
from tests.support.scheduler.term import FakeShards


class Election:
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
        self.elections: asyncio.Queue[Election] = asyncio.Queue()
        self.stored: Versioned | None = None
        self.stood = 0

    def discover(self, kind: str) -> None:
        return None

    async def campaign(self, *_: Any, **__: Any) -> Election:
        self.stood += 1
        return await self.elections.get()

    async def get(self, key: str) -> Versioned | None:
        return self.stored if key == TERM_KEY else None

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        self.stored = Versioned(value=value, mod_revision=expected_revision + 1)
        return self.stored.mod_revision


class Shards(FakeShards):
    """Whoever scans or leads has these, and none of them comes or goes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    async def changed(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest_asyncio.fixture
async def context(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SimpleNamespace]:
    """Of an instance that stands for election."""

    async def announce() -> None: ...

    monkeypatch.setattr(app, "_PAUSE_S", 0.0)
    for name in ("ShardScans", "PoolShards"):
        monkeypatch.setattr(app, name, Shards)
    made: Any = SimpleNamespace(
        config=SchedulerConfig(etcd="etcd:2379"),
        coordinator=coordinator,
        remote=lambda *_: None,
        security=SimpleNamespace(keyring=None),
        server=SimpleNamespace(add_service=lambda *_, **__: None),
        metadata={},
        announce=announce,
    )
    instance = made.instance = SchedulerApp(made)
    await instance.start()
    yield made
    await instance.stop()


async def test_deposed_leader_frees_its_queue_before_it_stands_again(
    context: SimpleNamespace, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a million groups, and the copies of a standby take their place."""
    states: list[weakref.ref[TermState]] = []

    class Watched(TermState):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            states.append(weakref.ref(self))

    monkeypatch.setattr(term, "TermState", Watched)
    election = Election()
    coordinator.elections.put_nowait(election)
    await until(lambda: context.metadata["leader"] == "true")
    assert states[0]() is not None
    election.over.set()
    await until(lambda: coordinator.stood == 2)
    assert states[0]() is None


async def test_failed_start_of_a_term_keeps_the_copies(
    context: SimpleNamespace, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard does not answer: at the next attempt the other is not scanned whole again."""
    scanned: list[tuple[str, str]] = []

    async def scan(
        _: Shards, shard: str, *, since: str = "", **_bounds: object
    ) -> AsyncIterator[Any]:
        scanned.append((shard, since))
        begin = pool_pb2.ScanGroupsResponse.Begin(mark="known", changes_only=bool(since))
        yield pool_pb2.ScanGroupsResponse(begin=begin)

    async def floors(_: Shards, names: object) -> Floors:
        return Floors(fence=0, term=0)

    async def raise_fence(_: Shards, shard: str, *, term: int) -> None:
        if shard == "s1" and not failed:
            failed.append(shard)
            raise Unavailable("gone")

    failed: list[str] = []
    monkeypatch.setattr(Shards, "scan", scan)
    monkeypatch.setattr(Shards, "raise_fence", raise_fence)
    monkeypatch.setattr(Shards, "floors", floors)
    for _ in range(2):
        coordinator.elections.put_nowait(Election())
    await until(lambda: context.metadata["leader"] == "true")
    assert failed == ["s1"]
    assert [since for shard, since in scanned if shard == "s0"][-1] == "known"


async def test_stopped_leader_resigns_also_if_etcd_is_slow(
    context: SimpleNamespace, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next leader waits for the end of the lease."""
    monkeypatch.setattr(tasks, "_REPEAT_S", 0.01)

    class Slow(Election):
        async def resign(self) -> None:
            await asyncio.sleep(0.1)
            await super().resign()

    election = Slow()
    coordinator.elections.put_nowait(election)
    await until(lambda: context.metadata["leader"] == "true")
    await context.instance.drain()
    assert not election.alive
