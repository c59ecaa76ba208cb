"""A library's cached blocks by chain hashes, for engines with a prefix cache of their own.

The library names blocks by hashes of its own; here a block is named by the tokens up to its end, as
routers name it. One block of the library may be several of the router's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from forge.core.placement.chain_hashes import ROOT, PromptChains, chain_hash
from forge.core.token_columns import int32_bytes
from services.inference.engines.cache_reports.cache_log import CacheLog


class BlockChains:
    """Records which blocks are cached, and reports changes to a `CacheLog`."""

    def __init__(self, log: CacheLog, *, block_tokens: int) -> None:
        """`block_tokens`: of the router's blocks."""
        self._log = log
        self._block_tokens = block_tokens
        self._chains: dict[Hashable, tuple[bytes, ...]] = {}
        """Chain hashes by the library's hash, in order."""
        self._blocks: dict[bytes, int] = {}
        """Number of the library's blocks with a chain: cache salts keep equal tokens apart."""

    def store(
        self, parent: Hashable | None, blocks: Iterable[tuple[Hashable, Sequence[int]]]
    ) -> None:
        """Note new blocks behind `parent`, each with the library's hash and its tokens.

        A block behind an unknown one has no name, nor has one without a whole number of the
        router's blocks.
        """
        before = (ROOT,) if parent is None else self._chains.get(parent)
        stored: list[bytes] = []
        for name, tokens in blocks:
            if before is None or not tokens or len(tokens) % self._block_tokens:
                break
            before = self._names(before[-1], tokens)
            if name in self._chains:
                continue
            self._chains[name] = before
            for chain in before:
                self._blocks[chain] = self._blocks.get(chain, 0) + 1
            stored += before
        if stored:
            self._log.stored(stored)

    def remove(self, names: Iterable[Hashable]) -> None:
        """Note evicted blocks; unknown ones change nothing."""
        for name in names:
            for chain in self._chains.pop(name, ()):
                self._blocks[chain] -= 1
                if not self._blocks[chain]:
                    del self._blocks[chain]
                    self._log.removed(chain)

    def clear(self) -> None:
        """Forget all blocks."""
        self._chains.clear()
        self._blocks.clear()
        self._log.cleared()

    def cached_tokens(self, ids: bytes) -> int:
        """Return how many leading tokens are cached, according to the events."""
        count = 0
        for chain in PromptChains(ids).of(self._block_tokens):
            if chain not in self._blocks:
                break
            count += self._block_tokens
        return count

    def _names(self, chain: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
        found = []
        for start in range(0, len(tokens), self._block_tokens):
            chain = chain_hash(chain, int32_bytes(tokens[start : start + self._block_tokens]))
            found.append(chain)
        return tuple(found)
