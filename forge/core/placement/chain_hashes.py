"""Chain hashes: names of blocks of tokens, each of all tokens up to its end.

Workers and routers name cached blocks so; a hash says nothing of the tokens. A collision costs a
worse placement and no wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from forge.core.token_columns import TOKEN_BYTES, common_tokens

HASH_BYTES = 8
ROOT = bytes(HASH_BYTES)
"""Hash before the first block."""


def chain_hash(before: bytes, block: bytes) -> bytes:
    """Return the hash of a block of token ids behind the blocks with the hash `before`."""
    return blake2b(block, digest_size=HASH_BYTES, key=before).digest()


class PromptChains:
    """The chain hashes of one prompt, computed once per block size."""

    def __init__(self, ids: bytes, *, after: PromptChains | None = None) -> None:
        """`after`: of a prompt with the same beginning, whose hashes are not computed again."""
        self.ids = ids
        self._after = after
        self._by_size: dict[int, tuple[bytes, ...]] = {}

    def of(self, block_tokens: int) -> tuple[bytes, ...]:
        """Return the hash of each whole block."""
        found = self._by_size.get(block_tokens)
        if found is None:
            known: Sequence[bytes] = ()
            if self._after is not None:
                shared = common_tokens(self._after.ids, self.ids) // block_tokens
                known = self._after.of(block_tokens)[:shared]
            further = _chains(self.ids, block_tokens, known)
            found = self._by_size[block_tokens] = (*known, *further)
        return found

    def detach(self) -> None:
        """Keep no prompt before; later block sizes are computed from the first token on."""
        self._after = None


class LastTurns:
    """The last prompt or answer of each session: its next turn is hashed from there on."""

    def __init__(self, *, most_bytes: int) -> None:
        """`most_bytes`: of the ids of all sessions; the hashes take as much again."""
        self._most_bytes = most_bytes
        self._bytes = 0
        self._prompts: OrderedDict[str, PromptChains] = OrderedDict()
        """By session, the longest silent first."""

    def prompt(self, ids: bytes, *, session: str) -> PromptChains:
        """Return the hashes of a prompt."""
        return PromptChains(ids, after=self._prompts.get(session))

    def keep(self, session: str, prompt: PromptChains) -> None:
        """Keep a session's prompt in place of the one before."""
        prompt.detach()
        if not session:
            return
        before = self._prompts.pop(session, None)
        self._bytes += len(prompt.ids) - (0 if before is None else len(before.ids))
        self._prompts[session] = prompt
        while self._bytes > self._most_bytes:
            _, oldest = self._prompts.popitem(last=False)
            self._bytes -= len(oldest.ids)


def _chains(ids: bytes, block_tokens: int, known: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the hashes behind `known`, those of the first blocks."""
    size = block_tokens * TOKEN_BYTES
    chain = known[-1] if known else ROOT
    for start in range(len(known) * size, len(ids) - size + 1, size):
        chain = chain_hash(chain, ids[start : start + size])
        yield chain
