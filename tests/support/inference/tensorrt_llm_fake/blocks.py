"""Blocks of keys and values that later requests reuse, and the events about them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour, misuse


class Blocks:
    """Full blocks by hash, least recently used first."""

    def __init__(self, *, block_tokens: int, buffer_events: int) -> None:
        self._size = block_tokens
        self._buffer = buffer_events
        self._stored: OrderedDict[int, int] = OrderedDict()
        """Generation of the weights that computed each."""
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._note({"type": "created", "num_blocks_per_cache_level": [512, 0]})

    def reuse(self, ids: list[int], *, salt: str | None, generation: int) -> int:
        """Return how many tokens are cached; those of older weights would be wrong keys."""
        found = 0
        for chain in self._chains(ids[:-1], salt):
            if chain not in self._stored:
                break
            if self._stored[chain] != generation:
                raise misuse("blocks of older weights are reused: no reset_prefix_cache, no salt")
            self._stored.move_to_end(chain)
            found += self._size
        return found

    def store(self, ids: list[int], *, salt: str | None, generation: int) -> None:
        """Keep the full blocks of a sequence."""
        parent: int | None = None
        for place, chain in enumerate(self._chains(ids, salt)):
            if chain not in self._stored:
                tokens = ids[place * self._size : (place + 1) * self._size]
                block = {
                    "block_hash": chain,
                    "tokens": [{"token_id": one, "token_extra_id": 0} for one in tokens],
                    "cache_level": 0,
                }
                self._note({"type": "stored", "parent_hash": parent, "blocks": [block]})
            self._stored[chain] = generation
            parent = chain
        while len(self._stored) > behaviour().capacity_blocks:
            self._note({"type": "removed", "block_hashes": [self._stored.popitem(last=False)[0]]})

    def clear(self) -> None:
        """Forget all."""
        if self._stored:
            self._note({"type": "removed", "block_hashes": list(self._stored)})
        self._stored.clear()

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _chains(self, ids: list[int], salt: str | None) -> list[int]:
        chains, chain = [], hash(salt)
        for at in range(0, len(ids) - self._size + 1, self._size):
            chain = hash((chain, *ids[at : at + self._size]))
            chains.append(chain)
        return chains

    def _note(self, data: dict[str, Any]) -> None:
        if not self._buffer:
            return
        played = behaviour()
        if played.lost_events:
            played.lost_events -= 1
        else:
            self._events.append({"event_id": self._number, "data": data})
        self._number += 1
