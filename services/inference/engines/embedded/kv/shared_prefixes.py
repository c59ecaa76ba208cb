"""Trunks: keys and values that running sequences share, stored once and read once per step.

The rollouts of a group share their prompt, the groups of a domain its examples. A shared prefix is
one row here; each sequence's own slab row has only the tokens after it. A step then reads a trunk
once for all its sequences instead of once for each; on a CPU these reads are most of a step's
attention.

The prefix cache shows shared prefixes: every running sequence pins the blocks of its prompt, and a
block with two pins is shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from forge.core.placement.prefix_cache import Match
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.slabs import SlabRow, Slabs

MIN_TRUNK_TOKENS = 64
"""A shorter shared prefix costs more than it saves."""


@dataclass(slots=True, eq=False, kw_only=True)
class Trunk(SlabRow):
    """One shared prefix."""

    key: int
    """Slot of its last block in the cache; all its sequences have pinned it."""
    sequences: list[Branch] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Branch(SlabRow):
    """A sequence that may have a trunk."""

    prompt_blocks: Match | None = None
    """The cached, pinned part of its prompt; None if its keys and values differ from those."""
    trunk: Trunk | None = None


class Trunks:
    """All trunks, in the memory of the running sequences."""

    def __init__(
        self,
        shape: KvShape,
        cache: KvCache,
        *,
        context_tokens: int,
        running: Slabs[Any],
        least_tokens: int = MIN_TRUNK_TOKENS,
    ) -> None:
        self._cache = cache
        self.slabs: Slabs[Trunk] = Slabs(
            shape,
            context_tokens=context_tokens,
            capacity_bytes=running.capacity_bytes,
            beside=running,
        )
        self._by_key: dict[int, Trunk] = {}
        self._least_tokens = least_tokens

    def seat(self, branch: Branch, running: Iterable[Branch]) -> None:
        """Give a sequence a trunk before it runs, if it shares enough with others.

        Sequences of `running` that share a new trunk join it.
        """
        blocks = branch.prompt_blocks
        if blocks is None:
            return
        shared = self._cache.shared_tokens(blocks)
        trunk = self._deepest(blocks, at_most=shared, at_least=max(self._least_tokens, shared // 2))
        if trunk is None and shared >= self._least_tokens:
            trunk = self._plant(blocks, shared)
            if trunk is not None:
                for other in running:
                    if other.trunk is None and self._shares(other, trunk):
                        _shorten(other, trunk.tokens)
                        _join(other, trunk)
        if trunk is not None:
            _join(branch, trunk)

    def leave(self, branch: Branch) -> None:
        """Remove a sequence from its trunk, and a trunk without sequences."""
        trunk, branch.trunk, branch.base = branch.trunk, None, 0
        if trunk is None:
            return
        trunk.sequences.remove(branch)
        if not trunk.sequences:
            del self._by_key[trunk.key]
            self.slabs.remove(trunk)

    def _deepest(self, blocks: Match, *, at_most: int, at_least: int) -> Trunk | None:
        size = self._cache.block_tokens
        for depth in range(at_most // size, -(-at_least // size) - 1, -1):
            trunk = self._by_key.get(blocks.slots[depth - 1])
            if trunk is not None:
                return trunk
        return None

    def _plant(self, blocks: Match, tokens: int) -> Trunk | None:
        trunk = Trunk(key=blocks.slots[tokens // self._cache.block_tokens - 1])
        if not self.slabs.add(trunk, tokens=tokens, expected_tokens=tokens):
            return None
        self._cache.read(blocks, trunk.slab.kv(trunk), end=tokens)
        self._by_key[trunk.key] = trunk
        return trunk

    def _shares(self, branch: Branch, trunk: Trunk) -> bool:
        blocks = branch.prompt_blocks
        if blocks is None or blocks.tokens < trunk.tokens:
            return False
        return blocks.slots[trunk.tokens // self._cache.block_tokens - 1] == trunk.key


def _join(branch: Branch, trunk: Trunk) -> None:
    branch.trunk, branch.base = trunk, trunk.tokens
    trunk.sequences.append(branch)


def _shorten(branch: Branch, tokens: int) -> None:
    """Drop the first `tokens` of a sequence's own keys and values, which its trunk has."""
    kept = branch.tokens - tokens
    for kv in branch.slab.kv(branch):
        kv[:, :, :kept] = kv[:, :, tokens : branch.tokens].clone()
    branch.tokens = kept
