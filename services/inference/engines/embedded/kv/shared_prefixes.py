"""Trunks: keys and values that several running sequences share, kept once and read once a step.

The rollouts of a group have their prompt in common, and groups of a domain its examples. What
running sequences share is one row here; each sequence's own slab row holds only what comes after.
A step then reads a trunk once for all its sequences instead of once for each, and on a CPU it is
this reading that a step's attention consists of.

What is shared is known from the prefix cache: every running sequence pins the blocks of its prompt,
and a block pinned by two is shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forge.core.placement.prefix_cache import Match
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.slabs import Slab, SlabRow, Slabs

MIN_TRUNK_TOKENS = 64
"""Sharing less than this costs more than it saves."""


@dataclass(slots=True, eq=False, kw_only=True)
class Trunk(SlabRow):
    """One shared prefix."""

    key: int
    """The cache's slot of its last block, which all its sequences have pinned."""
    sequences: list[Branch] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Branch(SlabRow):
    """A sequence as seen from here: it may stand on a trunk."""

    prompt_blocks: Match | None = None
    """The cached, pinned part of its prompt; None when its keys and values are not those cached."""
    trunk: Trunk | None = None


class Trunks:
    """All trunks, in at most `capacity_bytes`."""

    def __init__(
        self, shape: KvShape, cache: KvCache, *, context_tokens: int, capacity_bytes: int
    ) -> None:
        self._cache = cache
        self._slabs: Slabs[Trunk] = Slabs(
            shape, context_tokens=context_tokens, capacity_bytes=capacity_bytes
        )
        self._by_key: dict[int, Trunk] = {}

    @property
    def occupied(self) -> list[Slab]:
        """The slabs with trunks, in order."""
        return self._slabs.occupied

    def seat(self, branch: Branch, running: Iterable[Branch]) -> None:
        """Put a sequence that is about to run on a trunk, if it shares enough with others.

        A new trunk takes those of `running` that share it along.
        """
        blocks = branch.prompt_blocks
        if blocks is None:
            return
        shared = self._cache.shared_tokens(blocks)
        trunk = self._deepest(blocks, at_most=shared, at_least=max(MIN_TRUNK_TOKENS, shared // 2))
        if trunk is None and shared >= MIN_TRUNK_TOKENS:
            trunk = self._plant(blocks, shared)
            if trunk is not None:
                for other in running:
                    if other.trunk is None and self._shares(other, trunk):
                        _shorten(other, trunk.tokens)
                        _join(other, trunk)
        if trunk is not None:
            _join(branch, trunk)

    def leave(self, branch: Branch) -> None:
        """A trunk without sequences is cut down."""
        trunk, branch.trunk, branch.base = branch.trunk, None, 0
        if trunk is None:
            return
        trunk.sequences.remove(branch)
        if not trunk.sequences:
            del self._by_key[trunk.key]
            self._slabs.remove(trunk)

    def _deepest(self, blocks: Match, *, at_most: int, at_least: int) -> Trunk | None:
        size = self._cache.block_tokens
        for depth in range(at_most // size, -(-at_least // size) - 1, -1):
            trunk = self._by_key.get(blocks.slots[depth - 1])
            if trunk is not None:
                return trunk
        return None

    def _plant(self, blocks: Match, tokens: int) -> Trunk | None:
        trunk = Trunk(key=blocks.slots[tokens // self._cache.block_tokens - 1])
        if not self._slabs.add(trunk, tokens=tokens, expected_tokens=tokens):
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
    """Drop the first `tokens` of a sequence's own keys and values: they are in a trunk now."""
    kv = branch.slab.kv(branch)
    kept = branch.tokens - tokens
    kv[:, :, :, :kept] = kv[:, :, :, tokens : branch.tokens].clone()
    branch.tokens = kept
