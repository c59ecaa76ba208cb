"""Keys and values of running sequences on a device, where their addresses never change.

Each layer has one allocation for all sequences; each sequence has consecutive tokens in it, an
extent. A captured CUDA graph reads and writes these addresses; only the start and the length of
each sequence differ between two steps. Where the free tokens do not lie together, extents move
towards the start.

Shape suffixes: H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

import torch

from services.inference.engines.embedded.kv.moves import move_down
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.slabs import Row, aligned

SCRATCH_TOKENS = 32
"""Tokens at the start of each layer that belong to no sequence: padded rows of a graph use them."""


class Extents(Generic[Row]):
    """All running sequences, in `capacity_bytes`; stands in for `Slabs`."""

    def __init__(self, shape: KvShape, *, context_tokens: int, capacity_bytes: int) -> None:
        """Allocates all of the capacity."""
        self.capacity_bytes = capacity_bytes
        self._most_tokens = aligned(context_tokens)
        self._tokens = max(SCRATCH_TOKENS, capacity_bytes // shape.token_bytes)
        self._rows: list[Row] = []
        """By the start of their extents."""
        self.layers = [
            torch.zeros(
                (2, shape.heads, self._tokens, shape.head_size),
                dtype=shape.dtype,
                device=shape.device,
            )
            for _ in range(shape.layers)
        ]
        """[2, H, T, D] of each layer."""

    def __iter__(self) -> Iterator[Row]:
        """Yield the sequences."""
        yield from self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def kv(self, row: Row) -> list[torch.Tensor]:
        """Return the row's keys and values, [2, H, room, D] of each layer; writable."""
        extent = slice(row.row, row.row + row.room)
        return [kv_2HTD[:, :, extent] for kv_2HTD in self.layers]

    def add(self, row: Row, *, tokens: int, expected_tokens: int) -> bool:
        """Place a sequence of `tokens` that may grow to `expected_tokens`; False: no room.

        Its extent fits the latter if there is room, else the former.
        """
        for needed in (expected_tokens, tokens + 1):
            room = min(aligned(needed), self._most_tokens)
            place = self._find(room) if room >= tokens else None
            if place is not None:
                row.room, row.tokens = room, tokens
                self._insert(row, place)
                return True
        return False

    def remove(self, row: Row) -> None:
        """Free the extent of a sequence."""
        self._rows.remove(row)

    def promote(self, row: Row) -> bool:
        """Make room for the tokens of the next step; return False without room."""
        needed = row.tokens + row.step_tokens
        if needed <= row.room:
            return True
        if needed > self._most_tokens:
            return False
        least = aligned(needed)
        for room in (max(least, min(2 * row.room, self._most_tokens)), least):
            if self._end_of_gap(row) - row.row >= room:
                row.room = room
                return True
            place = self._find(room)
            if place is not None:
                self._move(row, place, room)
                return True
        return False

    def _find(self, room: int) -> int | None:
        """Return the start of so many free tokens; None without. May move extents."""
        free, end = 0, SCRATCH_TOKENS
        for row in self._rows:
            if row.row - end >= room:
                return end
            free += row.row - end
            end = row.row + row.room
        if self._tokens - end >= room:
            return end
        if free + self._tokens - end < room:
            return None
        return self._compact()

    def _compact(self) -> int:
        """Move all extents together; return where they end."""
        end = SCRATCH_TOKENS
        for row in self._rows:
            if row.row > end:
                for kv_2HTD in self.layers:
                    move_down(kv_2HTD, source=row.row, target=end, tokens=row.tokens)
                row.row = end
            end += row.room
        return end

    def _move(self, row: Row, place: int, room: int) -> None:
        """Copy a sequence to a free extent."""
        old = slice(row.row, row.row + row.tokens)
        for kv_2HTD in self.layers:
            kv_2HTD[:, :, place : place + row.tokens] = kv_2HTD[:, :, old]
        self._rows.remove(row)
        row.room = room
        self._insert(row, place)

    def _insert(self, row: Row, place: int) -> None:
        row.row = place
        self._rows.append(row)
        self._rows.sort(key=lambda one: one.row)

    def _end_of_gap(self, row: Row) -> int:
        """Return the start of the next extent."""
        number = self._rows.index(row) + 1
        return self._rows[number].row if number < len(self._rows) else self._tokens
