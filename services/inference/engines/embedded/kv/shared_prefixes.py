"""Keys and values of prefixes that running sequences share: stored once, read once per step.

The rollouts of a group share their prompt, the groups of a domain its examples. A shared prefix is
one row here; each sequence's own slab row has only the tokens after it. A step then reads it once
for all its sequences instead of once for each; on a CPU these reads are most of a step's attention.

The prefix cache shows shared prefixes: every running sequence pins the blocks of its prompt, and a
block with two pins is shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forge.core.placement.prefix_cache import Match
from services.inference.engines.embedded.kv.moves import move_down
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.slabs import SlabRow, Slabs
from services.inference.engines.embedded.memory_shortage import keep_if_room

MIN_SHARED_TOKENS = 64
"""A shorter shared prefix costs more than it saves."""


@dataclass(slots=True, eq=False, kw_only=True)
class SharedPrefix(SlabRow):
    """One shared prefix."""

    key: int
    """Slot of its last block in the cache; all its sequences have pinned it."""
    sequences: list[Branch] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Branch(SlabRow):
    """A sequence that may have a shared prefix."""

    prompt_blocks: Match | None = None
    """The cached, pinned part of its prompt; None if its keys and values differ from those."""
    shared: SharedPrefix | None = None


class SharedPrefixes:
    """All shared prefixes, in the memory of the running sequences."""

    def __init__(
        self,
        shape: KvShape,
        cache: KvCache,
        *,
        context_tokens: int,
        running: Slabs[Any],
        least_tokens: int = MIN_SHARED_TOKENS,
    ) -> None:
        self._shape = shape
        self._cache = cache
        self.slabs: Slabs[SharedPrefix] = Slabs(
            shape,
            context_tokens=context_tokens,
            capacity_bytes=running.capacity_bytes,
            beside=running,
        )
        self._by_key: dict[int, SharedPrefix] = {}
        self._least_tokens = least_tokens

    def seat(self, branch: Branch, running: Iterable[Branch]) -> None:
        """Give a sequence a shared prefix before it runs, if it shares enough with others.

        Sequences of `running` that have a new shared prefix join it.
        """
        blocks = branch.prompt_blocks
        if blocks is None:
            return
        tokens = self._cache.shared_tokens(blocks)
        least = max(self._least_tokens, tokens // 2)
        shared = self._deepest(blocks, at_most=tokens, at_least=least)
        if shared is None and tokens >= self._least_tokens:
            shared = self._plant(blocks, tokens)
            if shared is not None:
                for other in running:
                    if other.shared is None and self._shares(other, shared):
                        _shorten(other, shared.tokens)
                        _join(other, shared)
        if shared is not None:
            _join(branch, shared)

    def leave(self, branch: Branch) -> None:
        """Remove a sequence from its shared prefix, and a shared prefix without sequences."""
        shared, branch.shared, branch.base = branch.shared, None, 0
        if shared is None:
            return
        shared.sequences.remove(branch)
        if not shared.sequences:
            del self._by_key[shared.key]
            self.slabs.remove(shared)

    def _deepest(self, blocks: Match, *, at_most: int, at_least: int) -> SharedPrefix | None:
        size = self._cache.block_tokens
        for depth in range(at_most // size, -(-at_least // size) - 1, -1):
            shared = self._by_key.get(blocks.slots[depth - 1])
            if shared is not None:
                return shared
        return None

    def _plant(self, blocks: Match, tokens: int) -> SharedPrefix | None:
        shared = SharedPrefix(key=blocks.slots[tokens // self._cache.block_tokens - 1])
        if not self.slabs.add(shared, tokens=tokens, expected_tokens=tokens):
            return None
        read = partial(self._cache.read, blocks, shared.slab.kv(shared), end=tokens)
        if not keep_if_room("decode", read, self._shape.device):
            self.slabs.remove(shared)
            return None
        self._by_key[shared.key] = shared
        return shared

    def _shares(self, branch: Branch, shared: SharedPrefix) -> bool:
        blocks = branch.prompt_blocks
        if blocks is None or blocks.tokens < shared.tokens:
            return False
        return blocks.slots[shared.tokens // self._cache.block_tokens - 1] == shared.key


def _join(branch: Branch, shared: SharedPrefix) -> None:
    branch.shared, branch.base = shared, shared.tokens
    shared.sequences.append(branch)


def _shorten(branch: Branch, tokens: int) -> None:
    """Drop the first `tokens` of a sequence's own keys and values, which its shared prefix has."""
    kept = branch.tokens - tokens
    for kv in branch.slab.kv(branch):
        move_down(kv, source=tokens, target=0, tokens=kept)
    branch.tokens = kept
