"""The library's cache events, as changes by chain hashes.

The library names blocks by hashes of its own; here a block is named by the tokens up to its end, as
routers name it. Event ids are consecutive: after a gap the content is unknown, and begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forge.core.placement.chains import ROOT, PromptChains, chain_hash
from forge.core.token_columns import int32_bytes
from services.inference.engines.cache_log import CacheLog


class CacheEvents:
    """Keeps which blocks are cached, and tells a `CacheLog`."""

    def __init__(self, log: CacheLog, *, block_tokens: int) -> None:
        self.gaps = 0
        """Times that the content began anew."""
        self._log = log
        self._block_tokens = block_tokens
        self._next_id: int | None = None
        self._chains: dict[Any, bytes] = {}
        """Chain hash by the library's hash."""
        self._blocks: dict[bytes, int] = {}
        """Number of the library's blocks with a chain: cache salts keep equal tokens apart."""

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        number = event["event_id"]
        if self._next_id is not None and number != self._next_id:
            self.gaps += 1
            self.clear()
        self._next_id = number + 1
        data = event["data"]
        match data["type"]:
            case "created":
                self.clear()
            case "stored":
                self._store(data["parent_hash"], data["blocks"])
            case "removed":
                self._remove(data["block_hashes"])
            case _:
                pass  # Updates move blocks between GPU and host, where they stay cached.

    def restarted(self) -> None:
        """Expect event ids from any number on, and nothing cached."""
        self._next_id = None
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._chains.clear()
        self._blocks.clear()
        self._log.cleared()

    def cached_tokens(self, ids: bytes) -> int:
        """Return how many leading tokens are cached, as far as events tell."""
        count = 0
        for chain in PromptChains(ids).of(self._block_tokens):
            if chain not in self._blocks:
                break
            count += self._block_tokens
        return count

    def _store(self, parent: Any, blocks: Sequence[Mapping[str, Any]]) -> None:
        chain = ROOT if parent is None else self._chains.get(parent)
        stored = []
        for block in blocks:
            tokens = [_token(one) for one in block["tokens"]]
            # A block behind one that a gap has lost, or one that is not full, has no name.
            if chain is None or len(tokens) != self._block_tokens:
                break
            chain = chain_hash(chain, int32_bytes(tokens))
            if block["block_hash"] not in self._chains:
                self._chains[block["block_hash"]] = chain
                self._blocks[chain] = self._blocks.get(chain, 0) + 1
                stored.append(chain)
        if stored:
            self._log.stored(stored)

    def _remove(self, hashes: Iterable[Any]) -> None:
        for one in hashes:
            chain = self._chains.pop(one, None)
            if chain is None:
                continue
            self._blocks[chain] -= 1
            if not self._blocks[chain]:
                del self._blocks[chain]
                self._log.removed(chain)


def _token(stored: Any) -> int:
    """The library writes a token as a number, or with more that belongs to it."""
    return int(stored["token_id"] if isinstance(stored, Mapping) else stored)
