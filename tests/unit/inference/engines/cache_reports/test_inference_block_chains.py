"""Tests: a library's blocks by the router's chain hashes."""

from __future__ import annotations

from contextlib import aclosing

from forge.core.placement.chain_hashes import PromptChains
from forge.core.token_columns import int32_bytes
from services.inference.engines.cache_reports.block_chains import BlockChains
from services.inference.engines.cache_reports.cache_log import CacheLog

SIZE = 4


async def known(log: CacheLog) -> set[bytes]:
    async with aclosing(log.changes()) as changes:
        return set((await anext(changes)).stored)


def chains(ids: list[int]) -> set[bytes]:
    return set(PromptChains(int32_bytes(ids)).of(SIZE))


async def test_block_of_the_library_is_several_of_the_router() -> None:
    """They come and leave together; one behind it continues their chain, and one that is stored
    again changes nothing."""
    log = CacheLog()
    blocks = BlockChains(log, block_tokens=SIZE)
    ids = list(range(24))
    for _ in range(2):
        blocks.store(None, [(b"one", ids[:8])])
    blocks.store(b"one", [(b"two", ids[8:16]), (b"three", ids[16:])])
    assert await known(log) == chains(ids)
    assert blocks.cached_tokens(int32_bytes([*ids[:12], 99])) == 12
    blocks.remove([b"three", b"none"])
    assert await known(log) == chains(ids[:16])


async def test_block_of_another_size_has_no_name() -> None:
    """Nor has anything behind it, or behind a block that is not known."""
    log = CacheLog()
    blocks = BlockChains(log, block_tokens=SIZE)
    blocks.store(None, [(1, [0, 1, 2, 3, 4, 5]), (2, [6, 7, 8, 9])])
    blocks.store(2, [(3, [6, 7, 8, 9])])
    assert await known(log) == set()
