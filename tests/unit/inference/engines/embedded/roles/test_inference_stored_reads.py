"""Reads of the KV store on threads of their own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.roles.stored_reads import StoredReads
from tests.contract.engines import GREEDY, make_prompt, prompt_ids

SHAPE = KvShape(
    layers=2, windowed=False, heads=2, head_size=4, dtype=torch.float32, device=torch.device("cpu")
)


class Empty:
    """A store without blocks."""

    def read(self, *given: Any, **named: Any) -> None:
        """Find nothing."""


async def test_read_without_a_thread_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host without more threads; the next reads are not held up."""
    store: Any = Empty()
    reads = StoredReads(store, SHAPE, cached_tokens=lambda ids: 0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def read(seed: int) -> None:
        async with reads.during(make_prompt(prompt_ids(16, seed=seed), GREEDY)) as found:
            assert found is not None and found.kv is None

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for seed in range(8):
            await read(seed)
    async with asyncio.timeout(60):
        await asyncio.gather(*map(read, range(8)))
