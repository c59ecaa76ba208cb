"""A canary: an engine that gets a fixed share of the sessions, to compare it with others. Pure.

A hash of the session decides, so all turns of a session meet one engine, and all routers agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from services.inference.router.fleet.workers import Worker

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The engine and its share of the sessions."""

    engine: str = ""
    """Empty: no canary."""
    share: float = 0.0

    def takes(self, key: str) -> bool:
        """Whether a session, or a request without one, is in the share."""
        digest = blake2b(f"canary/{key}".encode(), digest_size=_HASH_BYTES).digest()
        return int.from_bytes(digest, "big") < self.share * (1 << 8 * _HASH_BYTES)

    def preferred(self, key: str, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Return the workers on a session's side of the canary; all, if there is none on it."""
        if not self.engine:
            return workers
        takes = self.takes(key)
        return [one for one in workers if (one.engine.name == self.engine) is takes] or workers
