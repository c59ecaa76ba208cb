"""An actor system for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from forge.runtime.actors.actor_system import ActorSystem


@pytest_asyncio.fixture
async def system() -> AsyncIterator[ActorSystem]:
    """An actor system that is stopped after the test."""
    made = ActorSystem("test")
    yield made
    await made.stop()
