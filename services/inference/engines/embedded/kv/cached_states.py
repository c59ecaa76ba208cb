"""Cached states of recurrent layers, each after one block of a prefix cache.

Owns which states leave when there is no room: the least recently used. A block without its states
stays cached; a prompt then resumes behind an earlier block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.metrics import CACHED_STATES, EVICTED_STATES


class CachedStates:
    """At most `rows` states, by the slot of the block before them."""

    def __init__(self, shape: KvShape, rows: int) -> None:
        self.are_needed = shape.states is not None
        """Whether a prompt cannot continue without states."""
        # The system allocates pages as rows fill.
        self._rows = torch.empty((rows, shape.state_bytes), dtype=torch.uint8, device=shape.device)
        self._oldest_first: dict[int, int] = {}
        """The row of each slot."""
        self._free = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._oldest_first)

    def deepest(self, slots: Sequence[int]) -> int:
        """Number of the first blocks up to the last one with states."""
        found = (depth for depth in range(len(slots), 0, -1) if slots[depth - 1] in self)
        return next(found, 0)

    def __contains__(self, slot: int) -> bool:
        return slot in self._oldest_first

    def read(self, slot: int, out: torch.Tensor) -> None:
        """Copy states to `out`, [1, S]."""
        row = self._oldest_first.pop(slot)
        self._oldest_first[slot] = row
        out[0] = self._rows[row]

    def store(self, slot: int, states: torch.Tensor) -> None:
        """Keep states, [1, S]; without any room they are left out."""
        row = self._oldest_first.pop(slot, None)
        if row is None:
            if not self._free and self._oldest_first:
                self.forget(next(iter(self._oldest_first)))
                EVICTED_STATES.inc()
            if not self._free:
                return
            row = self._free.pop()
        self._rows[row] = states[0]
        self._oldest_first[slot] = row
        CACHED_STATES.set(len(self))

    def forget(self, slot: int) -> None:
        """Drop the states of a block, if there are any: the slot has another block now."""
        row = self._oldest_first.pop(slot, None)
        if row is not None:
            self._free.append(row)
            CACHED_STATES.set(len(self))

    def clear(self) -> None:
        """Drop all."""
        for slot in list(self._oldest_first):
            self.forget(slot)
