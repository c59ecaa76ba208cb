"""KV slabs: a sequence keeps its values while others join, grow and leave."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch

from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.slabs import Slab, SlabRow, Slabs

SHAPE = KvShape(
    layers=2, windowed=False, heads=2, head_size=4, dtype=torch.float32, device=torch.device("cpu")
)
CONTEXT = 1024


def slabs(capacity_tokens: int = 1 << 20) -> Slabs[SlabRow]:
    return Slabs(SHAPE, context_tokens=CONTEXT, capacity_bytes=capacity_tokens * SHAPE.token_bytes)


def write(row: SlabRow, mark: float) -> None:
    for kv in row.slab.kv(row):
        kv[:, :, : row.tokens] = mark


def holds(row: SlabRow, mark: float) -> bool:
    return all(bool((kv[:, :, : row.tokens] == mark).all()) for kv in row.slab.kv(row))


@pytest.mark.parametrize("seed", range(5))
def test_kv_slabs_keep_every_sequence_intact(seed: int) -> None:
    """Through 400 random joins, growths and leaves every row reads its own values."""
    rng = random.Random(seed)
    all_slabs = slabs()
    marks: dict[SlabRow, float] = {}
    for step in range(400):
        if rng.random() < 0.4 or not marks:
            row = SlabRow()
            tokens = rng.randint(1, 600)
            expected = tokens + rng.randint(1, 300)
            assert all_slabs.add(row, tokens=tokens, expected_tokens=expected)
            marks[row] = float(step)
            write(row, marks[row])
        elif rng.random() < 0.6:
            row = rng.choice(list(marks))
            grown = min(CONTEXT, row.tokens + rng.randint(1, 300))
            while row.tokens < grown:
                assert all_slabs.promote(row)
                row.tokens = min(grown, row.slab.class_tokens)
                write(row, marks[row])
        else:
            row = rng.choice(list(marks))
            all_slabs.remove(row)
            del marks[row]
        assert all(holds(row, mark) for row, mark in marks.items())
        assert set(all_slabs) == set(marks)
    for row in list(marks):
        all_slabs.remove(row)
    assert all_slabs.bytes == 0


def test_kv_slabs_stay_within_their_byte_bound() -> None:
    """Joins are refused once memory is full; a leave makes room again."""
    small = slabs(capacity_tokens=4 * 256)
    rows = [SlabRow() for _ in range(5)]
    placed = [small.add(row, tokens=10, expected_tokens=200) for row in rows]
    assert placed == [True] * 4 + [False]
    small.remove(rows[0])
    assert small.add(rows[4], tokens=10, expected_tokens=200)
    assert small.bytes <= 4 * 256 * SHAPE.token_bytes


def test_long_expected_sequence_starts_in_a_small_class() -> None:
    """If only that class has room."""
    small = slabs(capacity_tokens=64)
    row = SlabRow()
    assert small.add(row, tokens=10, expected_tokens=1000)
    row.tokens = 64
    assert not small.promote(row)


def test_full_slabs_have_room_for_a_token_without_its_drafts() -> None:
    """A step with drafts needs the larger class, which has no room; one token does not."""
    small = slabs(capacity_tokens=4 * 64)
    rows = [SlabRow() for _ in range(4)]
    assert all(small.add(row, tokens=62, expected_tokens=64) for row in rows)
    rows[0].step_tokens = 4
    assert not small.promote(rows[0])
    rows[0].step_tokens = 2
    assert small.promote(rows[0])
    assert rows[0].slab.class_tokens == 64


def test_unused_rows_of_one_class_make_room_for_another() -> None:
    """Unused rows are freed before a join is refused."""
    small = slabs(capacity_tokens=4 * 256 + 512)
    short = [SlabRow() for _ in range(4)]
    for row in short:
        small.add(row, tokens=10, expected_tokens=200)
    for row in short[1:]:
        small.remove(row)
    long = [SlabRow() for _ in range(2)]
    assert all(small.add(row, tokens=300, expected_tokens=300) for row in long)


class Memory:
    """Counts the live bytes of the tensors that slabs allocate."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.live = self.peak = 0
        allocate = torch.zeros

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = allocate(*args, **kwargs)
            self.live += made.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(made.untyped_storage(), self._freed, made.nbytes)
            return made

        patch.setattr(torch, "zeros", counted)

    def _freed(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize("seed", range(3))
def test_kv_slabs_never_allocate_more_than_their_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through random joins, growths and leaves of sequences and shared prefixes, which have one
    bound: old and new memory of a growing slab count together."""
    rng = random.Random(seed)
    memory = Memory(monkeypatch)
    running = slabs(capacity_tokens=6 * 1024)
    prefixes: Slabs[SlabRow] = Slabs(
        SHAPE, context_tokens=CONTEXT, capacity_bytes=running.capacity_bytes, beside=running
    )
    rows: list[tuple[Slabs[SlabRow], SlabRow]] = []
    refused = 0
    for _ in range(600):
        if rng.random() < 0.5 or not rows:
            kind = rng.choice((running, running, prefixes))
            row = SlabRow()
            tokens = rng.randint(1, 600)
            if kind.add(row, tokens=tokens, expected_tokens=tokens + rng.randint(0, 300)):
                rows.append((kind, row))
            else:
                refused += 1
        elif rng.random() < 0.5:
            kind, row = rng.choice(rows)
            row.tokens = min(row.slab.class_tokens, CONTEXT - 1)
            refused += not kind.promote(row)
        else:
            kind, row = rows.pop(rng.randrange(len(rows)))
            kind.remove(row)
        assert memory.live == running.bytes + prefixes.bytes
    assert refused
    assert memory.peak <= running.capacity_bytes
    assert memory.peak > running.capacity_bytes // 2


@pytest.mark.parametrize("seed", range(5))
def test_slab_without_memory_to_grow_keeps_every_sequence(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocation fails now and then, in any layer: the row has no room, and all others stay."""
    rng = random.Random(seed)
    allocate = Slab._allocate

    def fails_at_times(self: Slab, rows: int) -> torch.Tensor:
        if rows and rng.random() < 0.5:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return allocate(self, rows)

    monkeypatch.setattr(Slab, "_allocate", fails_at_times)
    all_slabs = slabs()
    marks: dict[SlabRow, float] = {}
    refused = 0
    for step in range(300):
        if rng.random() < 0.5 or not marks:
            row = SlabRow()
            if not all_slabs.add(row, tokens=rng.randint(1, 600), expected_tokens=700):
                refused += 1
                continue
            marks[row] = float(step)
            write(row, marks[row])
        elif rng.random() < 0.5:
            row = rng.choice(list(marks))
            row.tokens = row.slab.class_tokens
            write(row, marks[row])
            if row.tokens < CONTEXT and not all_slabs.promote(row):
                refused += 1
        else:
            row = rng.choice(list(marks))
            all_slabs.remove(row)
            del marks[row]
        assert all(holds(row, mark) for row, mark in marks.items())
        assert set(all_slabs) == set(marks)
    assert refused
