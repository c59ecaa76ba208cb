"""A scheduler and a pool, for trainers of several ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from forge.runtime.coordination import Coordinator
from tests.support.runtime.etcd import EtcdServer
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
