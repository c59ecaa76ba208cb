"""Changes of a prefix cache: joined for a reader, the whole content for one that fell behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any
from unittest import mock

import pytest

from services.inference import kv_codec
from services.inference.engines.base import CacheChange
from services.inference.engines.cache_reports import cache_log
from services.inference.engines.cache_reports.cache_log import CacheLog

A, B, C = (bytes([n] * 8) for n in range(3))


async def test_block_that_was_removed_and_stored_again_is_stored() -> None:
    """Between two reads the last change of a block counts."""
    log = CacheLog()
    log.stored([A])
    async with aclosing(log.changes()) as changes:
        assert await anext(changes) == CacheChange(stored=(A,), anew=True)
        log.removed(A)
        log.stored([B, A])
        log.removed(B)
        assert await anext(changes) == CacheChange(stored=(A,), removed=(B,))


async def test_reader_that_fell_behind_gets_the_whole_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All blocks replace the changes that it missed."""
    monkeypatch.setattr(cache_log, "_KEPT", 2)
    log = CacheLog()
    async with aclosing(log.changes()) as changes:
        assert (await anext(changes)).anew
        log.stored([A, B, C])
        assert await anext(changes) == CacheChange(stored=(A, B, C), anew=True)


async def test_clearance_sends_a_reader_the_whole_content() -> None:
    """Also one that has read nothing since."""
    log = CacheLog()
    log.stored([A])
    async with aclosing(log.changes()) as changes:
        await anext(changes)
        log.cleared()
        log.stored([B])
        assert await anext(changes) == CacheChange(stored=(B,), anew=True)


class _CountedEntries(deque[Any]):
    """Counts the entries that are looked at."""

    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for entry in super().__iter__():
            self.seen += 1
            yield entry

    def __reversed__(self) -> Iterator[Any]:
        for entry in super().__reversed__():
            self.seen += 1
            yield entry


async def test_reader_looks_at_new_changes_alone() -> None:
    """The entries that it has read cost nothing, however many are kept."""
    log = CacheLog()
    log._entries = entries = _CountedEntries(maxlen=1000)
    log.stored([n.to_bytes(8) for n in range(500)])
    async with aclosing(log.changes()) as changes:
        await anext(changes)
        log.stored([A])
        log.removed(B)
        assert await anext(changes) == CacheChange(stored=(A,), removed=(B,))
    assert entries.seen == 2


async def test_reader_of_an_idle_cache_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the cache again after a change alone, which comes from the engine's thread."""
    monkeypatch.setattr(cache_log, "INTERVAL_S", 0.0)
    log = CacheLog()
    async with aclosing(log.changes()) as changes:
        await anext(changes)
        look = mock.Mock(wraps=log._since)
        monkeypatch.setattr(log, "_since", look)
        following = asyncio.create_task(anext(changes))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not look.called
        await asyncio.to_thread(log.stored, [A])
        assert await following == CacheChange(stored=(A,))
        assert look.call_count == 1


def test_large_change_travels_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removals come first; only the first message replaces the earlier content."""
    monkeypatch.setattr(kv_codec, "_MOST_CHAINS", 2)
    change = CacheChange(removed=(A, B, C), stored=(A, B, C), anew=True)
    read = [kv_codec.read_cache_change(one) for one in kv_codec.write_cache_change(change)]
    assert [one.anew for one in read] == [True, False, False]
    assert [chain for one in read for chain in one.removed] == [A, B, C]
    assert [chain for one in read for chain in one.stored] == [A, B, C]
    assert [len(one.stored) for one in read] == [0, 2, 1]
    assert list(kv_codec.write_cache_change(CacheChange())) == []
