"""Keys and values of running sequences, in a layout that a decode step reads without a copy.

A slab has the sequences of one length class, one row each, without gaps; each class is twice the
one before. A step attends over a view of each slab, cut at its longest sequence: less than half of
it is padding, and a long context does not slow short ones. Only growth, the move to a larger class
and the removal of a sequence copy. Each layer has a tensor of its own: a slab grows layer by layer,
so that its old and its new memory never exist together.

Shape suffixes: L layers, R rows, H key-value heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.memory_shortage import attempt

SMALLEST_CLASS_TOKENS = 64
_FIRST_ROWS = 4
ALIGNMENT_TOKENS = 16
"""Lengths of slabs and views are multiples of this, for vector kernels."""


@dataclass(slots=True, eq=False, kw_only=True)
class SlabRow:
    """A sequence's place in a slab; base class of sequences."""

    tokens: int = 0
    """Tokens with keys and values in this row."""
    base: int = 0
    """Tokens before them, with keys and values in a shared prefix."""
    step_tokens: int = 1
    """Tokens that the next step computes."""
    room: int = 0
    """Tokens that fit; of extents alone."""
    slab: Slab = field(init=False)
    row: int = field(init=False)
    """The row's number in its slab, or its first token among extents."""


Row = TypeVar("Row", bound=SlabRow)


class Slab:
    """The sequences of one length class."""

    def __init__(self, shape: KvShape, class_tokens: int) -> None:
        self.class_tokens = class_tokens
        self.rows: list[SlabRow] = []
        self._shape = shape
        self.layers = [self._allocate(0) for _ in range(shape.layers)]
        """[2, R, H, T, D] of each layer."""

    def bytes_with(self, rows: int) -> int:
        """Memory of this many rows."""
        return rows * self.class_tokens * self._shape.token_bytes

    @property
    def bytes(self) -> int:
        """Allocated memory."""
        return self.bytes_with(self.room)

    @property
    def room(self) -> int:
        """Rows allocated."""
        return self.layers[0].shape[1]

    def kv(self, row: SlabRow) -> list[torch.Tensor]:
        """Return the row's keys and values, [2, H, class_tokens, D] of each layer; writable."""
        return [kv_2RHTD[:, row.row] for kv_2RHTD in self.layers]

    def resize(self, rows: int) -> bool:
        """Allocate `rows` rows and copy the occupied ones; False without memory."""
        used, before = len(self.rows), self.room
        assert rows >= used
        for layer in range(self._shape.layers):
            tried = attempt(partial(self._allocate, rows), self._shape.device)
            if tried.result is None:
                # The layers that have grown show their old rows alone.
                least = min(before, rows)
                self.layers = [kv_2RHTD[:, :least] for kv_2RHTD in self.layers]
                return False
            kv = tried.result
            kv[:, :used] = self.layers[layer][:, :used]
            self.layers[layer] = kv
        return True

    def append(self, row: SlabRow) -> None:
        """Give `row` the next place."""
        row.slab, row.row = self, len(self.rows)
        self.rows.append(row)

    def vacate(self, place: int) -> None:
        """Remove the row at `place`; the last row fills the gap."""
        gone, last = self.rows[place], self.rows.pop()
        if last is not gone:
            for kv_2RHTD in self.layers:
                kv_2RHTD[:, place, :, : last.tokens] = kv_2RHTD[:, last.row, :, : last.tokens]
            self.rows[place] = last
            last.row = place

    def _allocate(self, rows: int) -> torch.Tensor:
        shape = self._shape
        return torch.zeros(
            (2, rows, shape.heads, self.class_tokens, shape.head_size),
            dtype=shape.dtype,
            device=shape.device,
        )


class Slabs(Generic[Row]):
    """All running sequences, in at most `capacity_bytes`, also while a slab grows."""

    def __init__(
        self,
        shape: KvShape,
        *,
        context_tokens: int,
        capacity_bytes: int,
        beside: Slabs[Any] | None = None,
    ) -> None:
        """`beside` has the same memory: the capacity is that of both."""
        self._shape = shape
        self.capacity_bytes = capacity_bytes
        self._slabs = [Slab(shape, tokens) for tokens in _classes(context_tokens)]
        self._beside = beside
        if beside is not None:
            beside._beside = self

    def kv(self, row: Row) -> list[torch.Tensor]:
        """Return the row's keys and values, [2, H, tokens, D] of each layer; writable."""
        return row.slab.kv(row)

    def __iter__(self) -> Iterator[Row]:
        """Yield the sequences in the order of a step's rows."""
        for slab in self._slabs:
            yield from slab.rows  # type: ignore[misc]

    def __len__(self) -> int:
        return sum(len(slab.rows) for slab in self._slabs)

    @property
    def bytes(self) -> int:
        """Allocated memory of all slabs."""
        return sum(slab.bytes for slab in self._slabs)

    def add(self, row: Row, *, tokens: int, expected_tokens: int) -> bool:
        """Place a sequence of `tokens` that may grow to `expected_tokens`; False: no room.

        Its class fits the latter if there is room, else the former.
        """
        for needed in (expected_tokens, tokens + 1):
            slab = self._class_for(needed)
            if self._make_room(slab):
                slab.append(row)
                row.tokens = tokens
                return True
        return False

    def remove(self, row: Row) -> None:
        """Free the place of a sequence."""
        row.slab.vacate(row.row)
        if not row.slab.rows:
            row.slab.resize(0)

    def promote(self, row: Row) -> bool:
        """Make room for the tokens of the next step; return False without room in a larger
        class."""
        needed = row.tokens + row.step_tokens
        if needed <= row.slab.class_tokens:
            return True
        slab = self._class_for(needed)
        if slab.class_tokens < needed or not self._make_room(slab):
            return False
        before, place, kv = row.slab, row.row, row.slab.kv(row)
        slab.append(row)
        for moved, kept in zip(slab.kv(row), kv, strict=True):
            moved[:, :, : row.tokens] = kept[:, :, : row.tokens]
        before.vacate(place)
        if not before.rows:
            before.resize(0)
        return True

    @property
    def occupied(self) -> list[Slab]:
        """The slabs with sequences, in order."""
        return [slab for slab in self._slabs if slab.rows]

    def _class_for(self, tokens: int) -> Slab:
        return next((s for s in self._slabs if tokens <= s.class_tokens), self._slabs[-1])

    def _make_room(self, slab: Slab) -> bool:
        if slab.room > len(slab.rows):
            return True
        for rows in (max(_FIRST_ROWS, 2 * slab.room), slab.room + 1):
            # The last layer's old memory is freed after its new memory is there.
            last_layer = slab.bytes // self._shape.layers
            grown = slab.bytes_with(rows) - slab.bytes + last_layer
            if self._shared_bytes + grown > self.capacity_bytes:
                self._trim(keep=slab)
            if self._shared_bytes + grown <= self.capacity_bytes and slab.resize(rows):
                return True
        return False

    @property
    def _shared_bytes(self) -> int:
        return self.bytes + (self._beside.bytes if self._beside is not None else 0)

    def _trim(self, *, keep: Slab) -> None:
        for slab in self._slabs:
            if slab is keep or slab.room == len(slab.rows):
                continue
            # The first layer's new memory is there before its old memory is freed.
            first_layer = slab.bytes_with(len(slab.rows)) // self._shape.layers
            if self._shared_bytes + first_layer <= self.capacity_bytes:
                slab.resize(len(slab.rows))


def _classes(context_tokens: int) -> list[int]:
    classes = [SMALLEST_CLASS_TOKENS]
    while classes[-1] < context_tokens:
        classes.append(2 * classes[-1])
    return [*classes[:-1], aligned(context_tokens)]


def aligned(tokens: int) -> int:
    """Round up to a multiple of `ALIGNMENT_TOKENS`."""
    return -(-tokens // ALIGNMENT_TOKENS) * ALIGNMENT_TOKENS
