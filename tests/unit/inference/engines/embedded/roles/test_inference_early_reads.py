"""Fetches of prompts that are still computed: when they wait, and when they fail at once."""

from __future__ import annotations

import asyncio

import pytest

from forge.core.errors import NotFound
from services.inference.engines.embedded.roles import early_reads
from services.inference.engines.embedded.roles.early_reads import EarlyReads
from tests.support.runtime.waiting import LIMIT_S, until


async def test_fetch_after_its_prefill_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes after the end of a prefill, unless its id is used again."""
    monkeypatch.setattr(early_reads, "_ARRIVAL_S", 0.01)
    reads = EarlyReads()
    with reads.during("a"):
        assert (await reads.find("a")).has_begun
    with pytest.raises(NotFound, match="the prefill of request a has ended"):
        await reads.find("a")
    with reads.during("a"):
        assert (await reads.find("a")).has_begun
    assert not len(reads)


async def test_ended_prefills_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one is forgotten: its fetch waits."""
    monkeypatch.setattr(early_reads, "_ARRIVAL_S", 0.01)
    monkeypatch.setattr(early_reads, "_ENDED", 1)
    reads = EarlyReads()
    for request_id in ("a", "b"):
        with reads.during(request_id):
            pass
    with pytest.raises(NotFound, match="no prefill of request a came"):
        await reads.find("a")
    with pytest.raises(NotFound, match="has ended"):
        await reads.find("b")


async def test_fetch_that_leaves_ends_no_wait_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated fetch of one prompt finds the prefill that comes after the first one has left."""
    monkeypatch.setattr(early_reads, "_ARRIVAL_S", LIMIT_S)
    reads = EarlyReads()
    first, second = (asyncio.create_task(reads.find("a")) for _ in range(2))
    await until(lambda: len(reads) == 1)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    with reads.during("a") as read:
        assert await second is read
    assert not len(reads)
