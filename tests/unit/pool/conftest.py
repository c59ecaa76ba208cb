"""A store in a fresh directory, and replicas of one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.pool.readers import ReaderThreads
from services.pool.store import PoolStore
from tests.support.pool.replicas import Node
from tests.support.pool.sweeper import Sweeper


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., PoolStore]]:
    """Opens a store in the test's directory, closing the one opened before."""
    opened: list[PoolStore] = []

    def open_(**settings: Any) -> PoolStore:
        while opened:
            opened.pop().close()
        opened.append(PoolStore(tmp_path / "shard", **settings))
        return opened[0]

    yield open_
    while opened:
        opened.pop().close()


@pytest.fixture
def store(open_store: Callable[..., PoolStore]) -> PoolStore:
    return open_store(shard="s0")


@pytest_asyncio.fixture
async def sweeper(store: PoolStore) -> AsyncIterator[Sweeper]:
    readers = ReaderThreads(1)
    yield Sweeper(store, readers)
    await readers.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    """Makes replicas by name."""
    made: list[Node] = []

    def make(name: str) -> Node:
        made.append(Node(tmp_path / name))
        return made[-1]

    yield make
    for one in made:
        one.store.close()
