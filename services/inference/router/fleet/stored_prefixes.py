"""The KV store that workers share, as one router knows it. Pure.

A block is of one version of the weights. While a fleet swaps one by one, two versions write and
read, so the prefixes of each version are apart.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf

from forge.core.placement.prefix_cache import PrefixCache
from forge.core.placement.routing import LearnedRate

_STORE_S_PER_TOKEN = 5e-6
"""Guess of the time to read one token from a KV store, until reads have shown it."""
_STORE_BLOCK_TOKENS = 64
_STORE_INDEX_TOKENS = 4 << 20
"""Most tokens of one version whose prefixes a router remembers as stored."""
_VERSIONS = 2
"""Versions with remembered prefixes: those that wrote last."""


class Store:
    """The KV store that workers share: its content, and the speed of reads."""

    def __init__(self) -> None:
        self._capacity_tokens = 0
        self._indexes: OrderedDict[int, PrefixCache] = OrderedDict()
        """By version, the last writer last."""
        self._rate = LearnedRate(_STORE_S_PER_TOKEN, memory_units=20_000.0)

    def hold(self, tokens: int) -> None:
        """Follow a store of this capacity; it keeps what it has."""
        if tokens != self._capacity_tokens:
            self._capacity_tokens = tokens
            self._indexes.clear()

    def observe(self, ids: bytes, *, version: int, tokens: int = 0, seconds: float = 0.0) -> None:
        """Note a prefix that a worker has written with weights `version`, and a read of `tokens` of
        it."""
        if not self._capacity_tokens:
            return
        if version not in self._indexes:
            self._indexes[version] = _store_index(self._capacity_tokens)
        self._indexes.move_to_end(version)
        self._indexes[version].insert(ids)
        if len(self._indexes) > _VERSIONS:
            self._indexes.popitem(last=False)
        self._rate.observe(seconds=seconds, units=tokens)

    def tokens(self, ids: bytes, *, version: int) -> int:
        """Return the tokens of a prompt that are stored for weights `version`."""
        index = self._indexes.get(version)
        return 0 if index is None else index.peek(ids)

    @property
    def s_per_token(self) -> float:
        """Seconds to read one token; infinite without a store."""
        return self._rate.seconds if self._capacity_tokens >= _STORE_BLOCK_TOKENS else inf


def _store_index(tokens: int) -> PrefixCache:
    most = min(tokens, _STORE_INDEX_TOKENS)
    return PrefixCache(block_tokens=_STORE_BLOCK_TOKENS, capacity_tokens=most)
