"""The KV store that workers share, as one router knows it. Pure."""

from __future__ import annotations

from math import inf

from forge.core.placement.prefix_cache import PrefixCache
from forge.core.placement.routing import LearnedRate

_STORE_S_PER_TOKEN = 5e-6
"""Guess of the time to read one token from a KV store, until reads have shown it."""
_STORE_BLOCK_TOKENS = 64
_STORE_INDEX_TOKENS = 4 << 20
"""Most tokens whose prefixes a router remembers as stored."""


class Store:
    """The KV store that workers share: its content, and the speed of reads."""

    def __init__(self) -> None:
        self._capacity_tokens = 0
        self._index = _store_index(0)
        self._rate = LearnedRate(_STORE_S_PER_TOKEN, memory_units=20_000.0)

    def hold(self, tokens: int) -> None:
        """Follow a store of this capacity; it keeps what it has."""
        if tokens != self._capacity_tokens:
            self._capacity_tokens = tokens
            self._index = _store_index(tokens)

    def observe(self, ids: bytes, *, tokens: int = 0, seconds: float = 0.0) -> None:
        """Note a prefix that a worker has written, and a read of `tokens` of it."""
        self._index.insert(ids)
        self._rate.observe(seconds=seconds, units=tokens)

    def clear(self) -> None:
        """Forget all prefixes: they are of earlier weights."""
        self._index.clear()

    def tokens(self, ids: bytes) -> int:
        """Return the stored tokens of a prompt."""
        return self._index.peek(ids)

    @property
    def s_per_token(self) -> float:
        """Seconds to read one token; infinite without a store."""
        return self._rate.seconds if self._index.capacity_blocks else inf


def _store_index(tokens: int) -> PrefixCache:
    most = min(tokens, _STORE_INDEX_TOKENS)
    return PrefixCache(block_tokens=_STORE_BLOCK_TOKENS, capacity_tokens=most)
