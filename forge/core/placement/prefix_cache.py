"""Index of a prefix cache: the cached token prefixes, their slots and their eviction order.

Owns a radix tree over blocks of tokens, slots, pins and the eviction order. Does not own the cached
data: a slot is a number; an engine stores keys and values under it, a router stores nothing.

Token ids are int32 little-endian bytes, as on the wire, so a block's key is one slice. The index
compares ids, not hashes: two prefixes never collide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forge.core.placement.chain_hashes import ROOT, chain_hash
from forge.core.token_columns import TOKEN_BYTES


@dataclass(slots=True, eq=False)
class _Block:
    """One block of tokens, behind all blocks before it."""

    parent: _Block | None
    key: bytes
    slot: int
    children: dict[bytes, _Block] = field(default_factory=dict)
    chain: bytes = ROOT
    """Hash of all tokens up to its end, if there is a listener."""
    pins: int = 0
    indexed: bool = True
    """False after an eviction while pinned; the last unpin frees its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest cached prefix of a prompt."""

    tokens: int
    slots: tuple[int, ...]
    """One per block, in order."""
    _blocks: tuple[_Block, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A new block of the index; the caller must fill `slot` with these tokens."""

    start_token: int
    slot: int
    _block: _Block


class IndexListener(Protocol):
    """Observes every change of the index, in order."""

    def stored(self, chains: list[bytes]) -> None:
        """New blocks, by their chain hashes."""

    def removed(self, chain: bytes) -> None:
        """An evicted block."""

    def cleared(self) -> None:
        """All blocks are gone."""


class PrefixCache:
    """Prefixes of at most `capacity_tokens`, with LRU eviction.

    Has only whole blocks of `block_tokens`. One ordered dict has the recency: a use moves the
    deepest block of a path first and its root last, so a block always comes after all blocks that
    extend it, and the first unpinned one is a leaf. Eviction is O(1).
    """

    def __init__(
        self, *, block_tokens: int, capacity_tokens: int, listener: IndexListener | None = None
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        self.block_tokens = block_tokens
        self.capacity_blocks = max(0, capacity_tokens // block_tokens)
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._root = _Block(parent=None, key=b"", slot=-1)
        self._listener = listener
        self._oldest_first: dict[_Block, None] = {}
        self._free = list(range(self.capacity_blocks - 1, -1, -1))

    @property
    def tokens(self) -> int:
        """Number of cached tokens, with evicted ones that are pinned."""
        return (self.capacity_blocks - len(self._free)) * self.block_tokens

    def match(self, ids: bytes, *, limit_tokens: int | None = None, pin: bool = False) -> Match:
        """Return the longest cached prefix of `ids` in whole blocks, at most `limit_tokens` long.

        Pinned blocks keep their slots, through `clear` too, until `unpin`.
        """
        path = list(self._walk(ids, limit_tokens))
        self._touch(path)
        if pin:
            for block in path:
                block.pins += 1
        return Match(
            tokens=len(path) * self.block_tokens,
            slots=tuple(block.slot for block in path),
            _blocks=tuple(path),
        )

    def peek(self, ids: bytes) -> int:
        """Return the number of cached tokens of `ids`; does not count as a use."""
        return sum(1 for _ in self._walk(ids, None)) * self.block_tokens

    def shared_tokens(self, match: Match) -> int:
        """Return the tokens of a pinned match that others have pinned too."""
        # A pin includes all blocks before it: the shared part is a prefix.
        return sum(1 for block in match._blocks if block.pins > 1) * self.block_tokens

    def unpin(self, match: Match) -> None:
        """Unpin a match; once per pinned match."""
        for block in match._blocks:
            block.pins -= 1
            if block.pins == 0 and not block.indexed:
                self._free.append(block.slot)

    def insert(self, ids: bytes) -> list[Placed]:
        """Index the whole blocks of `ids`; return the new ones, which the caller must fill now.

        If every slot is pinned or part of this prefix, it indexes a shorter prefix.
        """
        path = list(self._walk(ids, None))
        self._touch(path)
        # Making room must not evict the path that is being extended.
        for block in path:
            block.pins += 1
        placed = []
        parent = path[-1] if path else self._root
        for index in range(len(path), len(ids) // self._block_bytes):
            slot = self._take_slot()
            if slot is None:
                break
            key = ids[index * self._block_bytes : (index + 1) * self._block_bytes]
            block = _Block(parent=parent, key=key, slot=slot, pins=1)
            if self._listener is not None:
                block.chain = chain_hash(parent.chain, key)
            parent.children[key] = block
            path.append(block)
            start = index * self.block_tokens
            placed.append(Placed(start_token=start, slot=slot, _block=block))
            parent = block
        for block in path:
            block.pins -= 1
        self._touch(path)
        if self._listener is not None and placed:
            self._listener.stored([block.chain for block in path[-len(placed) :]])
        return placed

    def withdraw(self, placed: Sequence[Placed]) -> None:
        """Remove the blocks of the last `insert`: the caller could not fill them."""
        for one in reversed(placed):
            self._remove(one._block)
            self._free.append(one.slot)

    def clear(self) -> None:
        """Remove every prefix; an unpin frees the slots of pinned ones."""
        for block in self._oldest_first:
            block.indexed = False
            if block.pins == 0:
                self._free.append(block.slot)
        self._oldest_first.clear()
        self._root.children.clear()
        if self._listener is not None:
            self._listener.cleared()

    def _walk(self, ids: bytes, limit_tokens: int | None) -> Iterator[_Block]:
        tokens = len(ids) // TOKEN_BYTES
        if limit_tokens is not None:
            tokens = min(tokens, limit_tokens)
        block = self._root
        for index in range(tokens // self.block_tokens):
            key = ids[index * self._block_bytes : (index + 1) * self._block_bytes]
            child = block.children.get(key)
            if child is None:
                return
            yield child
            block = child

    def _touch(self, path: list[_Block]) -> None:
        for block in reversed(path):
            self._oldest_first.pop(block, None)
            self._oldest_first[block] = None

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        victim = next((block for block in self._oldest_first if block.pins == 0), None)
        if victim is None:
            return None
        self._remove(victim)
        return victim.slot

    def _remove(self, leaf: _Block) -> None:
        del self._oldest_first[leaf]
        assert leaf.parent is not None and not leaf.children
        del leaf.parent.children[leaf.key]
        leaf.indexed = False
        if self._listener is not None:
            self._listener.removed(leaf.chain)
