"""Tests: the library's cache events as changes by chain hashes."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from forge.core.placement.chain_hashes import PromptChains
from forge.core.token_columns import int32_bytes
from services.inference.engines.cache_reports.cache_log import CacheLog
from services.inference.engines.tensorrt_llm.cache_events import CacheEvents

SIZE = 4


class Feed:
    """Events with consecutive ids."""

    def __init__(self) -> None:
        self.log = CacheLog()
        self.events = CacheEvents(self.log, block_tokens=SIZE)
        self.number = 0

    def send(self, data: dict[str, Any]) -> None:
        self.events.apply({"event_id": self.number, "data": data})
        self.number += 1

    def store(self, parent: int | None, **blocks: list[int]) -> None:
        """`h12=[...]`: the block with hash 12."""
        stored = [
            {"block_hash": int(name[1:]), "tokens": tokens, "cache_level": 0}
            for name, tokens in blocks.items()
        ]
        self.send({"type": "stored", "parent_hash": parent, "blocks": stored})

    def cached(self, ids: list[int]) -> int:
        return self.events.cached_tokens(int32_bytes(ids))

    async def present(self) -> set[bytes]:
        async with aclosing(self.log.changes()) as changes:
            return set((await anext(changes)).stored)


def chains(ids: list[int]) -> set[bytes]:
    return set(PromptChains(int32_bytes(ids)).of(SIZE))


async def test_blocks_are_named_by_all_tokens_up_to_their_end() -> None:
    """Blocks behind others continue their chain, in one event or several."""
    feed = Feed()
    feed.store(None, h1=[0, 1, 2, 3], h2=[4, 5, 6, 7])
    feed.store(2, h3=[8, 9, 10, 11])
    assert await feed.present() == chains(list(range(12)))
    assert feed.cached([*range(12), 99]) == 12
    assert feed.cached([0, 1, 2, 3, 4, 5, 6, 99]) == 4


async def test_tokens_may_be_records() -> None:
    """The library writes a token as a number, or with its extra id."""
    feed = Feed()
    tokens: Any = [{"token_id": one, "token_extra_id": 0} for one in range(4)]
    feed.store(None, h1=tokens)
    assert await feed.present() == chains([0, 1, 2, 3])


async def test_block_that_is_not_full_has_no_name() -> None:
    """Nor has anything behind it."""
    feed = Feed()
    feed.store(None, h1=[0, 1, 2])
    feed.store(1, h2=[3, 4, 5, 6])
    assert await feed.present() == set()


async def test_equal_tokens_of_two_salts_leave_with_the_last() -> None:
    """The library keeps them apart; routers know tokens alone."""
    feed = Feed()
    feed.store(None, h1=[0, 1, 2, 3])
    feed.store(None, h2=[0, 1, 2, 3])
    feed.send({"type": "removed", "block_hashes": [1, 77]})
    assert await feed.present() == chains([0, 1, 2, 3])
    feed.send({"type": "removed", "block_hashes": [2]})
    assert await feed.present() == set()


async def test_gap_repeats_the_whole_content() -> None:
    """What came before a lost event is unknown, and so is what continues it."""
    feed = Feed()
    feed.store(None, h1=[0, 1, 2, 3])
    feed.number += 1
    feed.store(1, h2=[4, 5, 6, 7])
    feed.store(None, h3=[8, 8, 8, 8])
    assert feed.events.gaps == 1
    assert await feed.present() == chains([8, 8, 8, 8])
    assert feed.cached(list(range(8))) == 0


async def test_moves_between_levels_change_nothing() -> None:
    """A block on the host is still cached."""
    feed = Feed()
    feed.store(None, h1=[0, 1, 2, 3])
    feed.send({"type": "updated", "block_hash": 1, "cache_level": {"old_value": 0, "new_value": 1}})
    assert await feed.present() == chains([0, 1, 2, 3])


async def test_restarted_engine_repeats_the_content_without_a_gap() -> None:
    """Its event ids begin at 0 again, too."""
    feed = Feed()
    feed.store(None, h1=[0, 1, 2, 3])
    feed.events.restarted()
    feed.number = 0
    feed.send({"type": "created", "num_blocks_per_cache_level": [8, 0]})
    assert feed.events.gaps == 0
    assert await feed.present() == set()
