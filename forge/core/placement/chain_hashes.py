"""Chain hashes: names of blocks of tokens, each of all tokens up to its end.

Workers and routers name cached blocks so; a hash says nothing of the tokens. A collision costs a
worse placement and no wrong answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

from forge.core.token_columns import TOKEN_BYTES

HASH_BYTES = 8
ROOT = bytes(HASH_BYTES)
"""Hash before the first block."""


def chain_hash(before: bytes, block: bytes) -> bytes:
    """Return the hash of a block of token ids behind the blocks with the hash `before`."""
    return blake2b(block, digest_size=HASH_BYTES, key=before).digest()


class PromptChains:
    """The chain hashes of one prompt, computed once per block size."""

    def __init__(self, ids: bytes, *, after: PromptChains | None = None) -> None:
        """`after`: of a prompt that `ids` begin with; its hashes are not computed again."""
        self.ids = ids
        self._after = after
        self._by_size: dict[int, tuple[bytes, ...]] = {}

    def of(self, block_tokens: int) -> tuple[bytes, ...]:
        """Return the hash of each whole block."""
        found = self._by_size.get(block_tokens)
        if found is None:
            known = () if self._after is None else self._after.of(block_tokens)
            further = _chains(self.ids, block_tokens, known)
            found = self._by_size[block_tokens] = (*known, *further)
        return found


def _chains(ids: bytes, block_tokens: int, known: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the hashes behind `known`, those of the first blocks."""
    size = block_tokens * TOKEN_BYTES
    chain = known[-1] if known else ROOT
    for start in range(len(known) * size, len(ids) - size + 1, size):
        chain = chain_hash(chain, ids[start : start + size])
        yield chain
