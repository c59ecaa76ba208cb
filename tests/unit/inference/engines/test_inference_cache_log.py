"""Changes of a prefix cache: joined for a reader, all anew for one that fell behind."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from services.inference import kv_codec
from services.inference.engines import cache_log
from services.inference.engines.base import CacheChange
from services.inference.engines.cache_log import CacheLog

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


async def test_reader_that_fell_behind_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the whole content."""
    monkeypatch.setattr(cache_log, "_KEPT", 2)
    log = CacheLog()
    async with aclosing(log.changes()) as changes:
        assert (await anext(changes)).anew
        log.stored([A, B, C])
        assert await anext(changes) == CacheChange(stored=(A, B, C), anew=True)


async def test_clearance_makes_a_reader_begin_anew() -> None:
    """Also one that has read nothing since."""
    log = CacheLog()
    log.stored([A])
    async with aclosing(log.changes()) as changes:
        await anext(changes)
        log.cleared()
        log.stored([B])
        assert await anext(changes) == CacheChange(stored=(B,), anew=True)


def test_large_change_travels_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removals come first, and the first message alone begins anew."""
    monkeypatch.setattr(kv_codec, "_MOST_CHAINS", 2)
    change = CacheChange(removed=(A, B, C), stored=(A, B, C), anew=True)
    read = [kv_codec.read_cache_change(one) for one in kv_codec.write_cache_change(change)]
    assert [one.anew for one in read] == [True, False, False]
    assert [chain for one in read for chain in one.removed] == [A, B, C]
    assert [chain for one in read for chain in one.stored] == [A, B, C]
    assert [len(one.stored) for one in read] == [0, 2, 1]
    assert list(kv_codec.write_cache_change(CacheChange())) == []
