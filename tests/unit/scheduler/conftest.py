"""One term's actors around pool shards that are not there."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.scheduler.term import Clock, FakeShards, TermActors


@pytest.fixture
def shards() -> FakeShards:
    return FakeShards()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def term(shards: FakeShards, clock: Clock) -> AsyncIterator[TermActors]:
    actors = TermActors(shards, clock)
    await actors.start()
    yield actors
    await actors.system.stop()
