"""The pool shards of one term: which ones were read, and which ones get new groups.

Owned by the term; the actor of removals changes it too, on the same event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from forge.core.errors import NotFound
from forge.v1 import scheduler_pb2


class ShardMembership:
    """Sets of shard names; `changed` wakes the task that follows them."""

    def __init__(self) -> None:
        self.registered: frozenset[str] = frozenset()
        """Fenced and scanned."""
        self.unread: frozenset[str] = frozenset()
        """May hold groups, and were unreachable when the term began."""
        self.retiring: frozenset[str] = frozenset()
        """Retired by an operator: no new groups, and theirs move away."""
        self.moving: frozenset[str] = frozenset()
        """Sources of the present step of a retirement, and of an open move."""
        self.progress: dict[str, scheduler_pb2.ShardRetirement] = {}
        """By shard that retires."""
        self._changed = asyncio.Event()

    @property
    def known(self) -> frozenset[str]:
        """Every shard that may hold groups."""
        return self.registered | self.unread

    def require_known(self, shard: str) -> None:
        """Raises NotFound for a shard that holds no groups."""
        if shard not in self.known:
            names = ", ".join(sorted(self.known)) or "none"
            raise NotFound(f"pool shard {shard!r} is not known; there are: {names}")

    @property
    def withheld(self) -> frozenset[str]:
        """Shards whose groups are neither leased nor batched: a group that moves would lose its
        lease. A cancelled retirement ends here only with its last move."""
        return self.retiring | self.moving

    def placeable(self, live: frozenset[str]) -> frozenset[str]:
        """Shards of `live` that accept new groups."""
        return (self.registered & live) - self.retiring

    def set_retiring(self, shards: frozenset[str]) -> None:
        """Shards that retire from now on."""
        self.retiring = shards
        self.progress = {
            shard: self.progress.get(shard, scheduler_pb2.ShardRetirement(pool_shard=shard))
            for shard in sorted(shards)
        }
        self.announce()

    def set_moving(self, shards: frozenset[str]) -> None:
        """Shards whose groups may be in a move from now on."""
        before, self.moving = self.withheld, shards
        if self.withheld != before:
            self.announce()

    def remove(self, shard: str) -> None:
        """Remove a shard that is gone."""
        self.registered -= {shard}
        self.unread -= {shard}
        self.set_retiring(self.retiring - {shard})

    def announce(self) -> None:
        """Wakes the waiting task."""
        self._changed.set()
        self._changed = asyncio.Event()

    def changed(self) -> Coroutine[Any, Any, object]:
        """Return an awaitable for the next change after this call."""
        return self._changed.wait()
