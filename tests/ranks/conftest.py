"""A scheduler and a pool, for trainers of several ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator
from tests.support.runtime.etcd import EtcdServer
from tests.support.trainer.process import ranks_of
from tests.support.trainer.stack import Stack, started_stack


@pytest_asyncio.fixture
async def stack(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[Stack]:
    """Tests end the ranks of the trainer themselves."""
    async with started_stack(
        tmp_path, etcd=etcd, cluster=cluster, coordinator=coordinator
    ) as started:
        yield started


@pytest.fixture
def ended_ranks(stack: Stack) -> Iterator[None]:
    """Leaves no rank of torchrun behind."""
    yield
    process = stack.trainer.process
    if process is not None:
        started = ranks_of(stack.trainer)
        process.kill()  # first: it would restart the ranks, which hold its stderr open
        for each in started.values():
            each.kill()
