"""The library's cache events, as changes by chain hashes.

Event ids are consecutive: after a gap the content is unknown, and begins again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.inference.engines.cache_reports.block_chains import BlockChains
from services.inference.engines.cache_reports.cache_log import CacheLog


class CacheEvents(BlockChains):
    """Records which blocks are cached, and reports changes to a `CacheLog`."""

    def __init__(self, log: CacheLog, *, block_tokens: int) -> None:
        super().__init__(log, block_tokens=block_tokens)
        self.gaps = 0
        """Times that the content began again."""
        self._next_id: int | None = None

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
                blocks = (
                    (one["block_hash"], [_token(token) for token in one["tokens"]])
                    for one in data["blocks"]
                )
                self.store(data["parent_hash"], blocks)
            case "removed":
                self.remove(data["block_hashes"])
            case _:
                pass  # Updates move blocks between GPU and host, where they stay cached.

    def restarted(self) -> None:
        """Expect event ids from any number on, and nothing cached."""
        self._next_id = None
        self.clear()


def _token(stored: Any) -> int:
    """The library writes a token as a number, or with more that belongs to it."""
    return int(stored["token_id"] if isinstance(stored, Mapping) else stored)
