"""Extents: a sequence keeps its values at fixed addresses while others join, grow and leave."""

from __future__ import annotations

import random

import pytest
import torch

from services.inference.engines.embedded.kv import moves
from services.inference.engines.embedded.kv.extents import SCRATCH_TOKENS, Extents
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.slabs import SlabRow
from services.inference.engines.embedded.memory_shortage import Attempt

SHAPE = KvShape(
    layers=2, windowed=False, heads=2, head_size=4, dtype=torch.float32, device=torch.device("cpu")
)
CONTEXT = 1024


def extents(capacity_tokens: int) -> Extents[SlabRow]:
    capacity_bytes = capacity_tokens * SHAPE.token_bytes
    return Extents(SHAPE, context_tokens=CONTEXT, capacity_bytes=capacity_bytes)


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_kv_extents_keep_every_sequence_intact(
    seed: int, has_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through 400 random joins, growths and leaves in nearly full memory, at the same addresses;
    also without memory for a copy beside."""
    if not has_memory:
        monkeypatch.setattr(moves, "attempt", lambda *_: Attempt(shortage="out of memory"))
    rng = random.Random(seed)
    store = extents(4000)
    addresses = [kv.data_ptr() for kv in store.layers]
    marks: dict[SlabRow, float] = {}

    def write(row: SlabRow, mark: float) -> None:
        for kv in store.kv(row):
            kv[:, :, : row.tokens] = mark

    refused = 0
    for step in range(400):
        if rng.random() < 0.5 or not marks:
            row = SlabRow()
            tokens = rng.randint(1, 600)
            expected = tokens + rng.randint(1, 300)
            if store.add(row, tokens=tokens, expected_tokens=expected):
                marks[row] = float(step)
                write(row, marks[row])
            else:
                refused += 1
        elif rng.random() < 0.6:
            row = rng.choice(list(marks))
            row.step_tokens = rng.randint(1, 300)
            if store.promote(row):
                row.tokens += row.step_tokens
                write(row, marks[row])
            row.step_tokens = 1
        else:
            row = rng.choice(list(marks))
            store.remove(row)
            del marks[row]
        for row, mark in marks.items():
            assert row.row >= SCRATCH_TOKENS
            assert all(bool((kv[:, :, : row.tokens] == mark).all()) for kv in store.kv(row))
        assert set(store) == set(marks)
    assert refused
    assert [kv.data_ptr() for kv in store.layers] == addresses


def test_kv_extents_move_together_for_a_longer_sequence() -> None:
    """Free tokens that do not lie together are used; more than are free are refused."""
    store = extents(SCRATCH_TOKENS + 4 * 64)
    rows = [SlabRow() for _ in range(4)]
    assert all(store.add(row, tokens=40, expected_tokens=64) for row in rows)
    store.remove(rows[0])
    store.remove(rows[2])
    assert not store.add(SlabRow(), tokens=129, expected_tokens=150)
    assert store.add(SlabRow(), tokens=100, expected_tokens=128)


def test_kv_extents_grow_up_to_the_context() -> None:
    """In place, if the tokens behind are free, and not beyond."""
    store = extents(4096)
    row, behind = SlabRow(), SlabRow()
    assert store.add(row, tokens=16, expected_tokens=16)
    first = row.row
    assert store.promote(row)
    assert row.row == first
    assert store.add(behind, tokens=16, expected_tokens=16)
    row.tokens = row.room
    assert store.promote(row)
    assert row.row > behind.row
    row.tokens = CONTEXT
    assert not store.promote(row)
