"""States of recurrent layers: rows of running sequences, and cached ones."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from prometheus_client import REGISTRY

from forge.core.token_columns import int32_bytes
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.slabs import SlabRow
from services.inference.engines.embedded.kv.state_rows import StateRows
from services.inference.engines.embedded.recurrent.read_states import ReadStates
from services.inference.engines.embedded.recurrent.shape import StateShape

CPU = torch.device("cpu")
STATES = StateShape(
    {
        (1, "recurrent", 0): torch.zeros(1, 3, dtype=torch.float64),
        (0, "conv", 0): torch.zeros(1, 2, 4, dtype=torch.bfloat16),
    }
)
SHAPE = KvShape(
    layers=1,
    windowed=False,
    heads=1,
    head_size=1,
    dtype=torch.float32,
    device=CPU,
    states=STATES,
)
BLOCK = 4


def row(mark: int) -> torch.Tensor:
    return torch.full((1, STATES.bytes), mark, dtype=torch.uint8)


def test_each_state_has_its_own_part_of_a_row() -> None:
    """Rows are read and written in place, by layer, with their own types."""
    rows = STATES.zeros(2, CPU)
    STATES.of_layer(0, rows)["conv", 0][1] = 2.0
    STATES.of_layer(1, rows)["recurrent", 0][1] = 3.0
    assert STATES.of_layer(0, rows)["conv", 0].tolist() == [[[0.0] * 4] * 2, [[2.0] * 4] * 2]
    other = STATES.zeros(2, CPU)
    STATES.copy_layer(1, rows, other)
    assert not other[:, :64].any()
    assert STATES.of_layer(1, other)["recurrent", 0].tolist() == [[0.0] * 3, [3.0] * 3]


def test_sequences_keep_their_states_while_others_leave() -> None:
    """Through 200 random joins, steps and leaves each has its own states, and those after its last
    whole block."""
    rng = random.Random(0)
    rows = StateRows(STATES, CPU, rows=8, block_tokens=BLOCK)
    running: dict[SlabRow, int] = {}
    for _ in range(200):
        if len(running) < 8 and rng.random() < 0.5:
            sequence = SlabRow(tokens=rng.randrange(1, 9))
            running[sequence] = sequence.tokens
            rows.add(sequence, row(sequence.tokens))
        elif running and rng.random() < 0.3:
            sequence = rng.choice(list(running))
            rows.remove(sequence)
            del running[sequence]
        order = list(running)
        rng.shuffle(order)
        if order:
            batch = rows.batch(order)
            for sequence in order:
                sequence.tokens += 1
            places = range(len(order)) if batch.places_B is None else batch.places_B
            for number, place in enumerate(places):
                batch.rows_BS[number] = order[int(place)].tokens
            rows.advance()
        for sequence in order:
            ended = sequence.tokens // BLOCK * BLOCK
            kept = rows.kept(sequence)
            # Without any if none has ended since it joined.
            assert set(kept) == ({ended} if ended >= max(BLOCK, running[sequence]) else set())
            assert all(bool((state == tokens).all()) for tokens, state in kept.items())
        assert len(rows) == len(running)


def test_prompt_goes_on_from_the_deepest_cached_states() -> None:
    """Blocks behind them are computed again; states leave with their block, with a clear, and when
    there are too many, the least recently used first."""
    states, tokens = 2, 12
    capacity = states * (STATES.bytes + 512 * SHAPE.token_bytes)
    cache = KvCache(SHAPE, block_tokens=BLOCK, capacity_bytes=capacity)
    ids = int32_bytes(range(tokens))
    kv = SHAPE.empty(tokens)
    cache.store(ids, kv, routes=SHAPE.unknown_routes(tokens))
    assert cache.resumable(ids, limit_tokens=tokens).tokens == 0
    cache.store_states(ids, {4: row(4), 8: row(8)})
    cache.store_states(int32_bytes(range(50, 60)), {4: row(9)})
    evicted = REGISTRY.get_sample_value("forge_inference_evicted_states_total") or 0.0
    match = cache.resumable(ids, limit_tokens=11)
    assert match.tokens == 8
    found = row(0)
    cache.read_states(match, found)
    assert bool((found == 8).all())
    cache.store_states(ids, {12: row(12)})
    assert REGISTRY.get_sample_value("forge_inference_evicted_states_total") == evicted + 1
    assert REGISTRY.get_sample_value("forge_inference_cached_states") == 2
    assert cache.resumable(ids, limit_tokens=7).tokens == 0
    assert cache.resumable(ids, limit_tokens=tokens).tokens == 12
    cache.clear()
    cache.store(ids, kv, routes=SHAPE.unknown_routes(tokens))
    assert cache.resumable(ids, limit_tokens=tokens).tokens == 0


def test_evicted_block_takes_its_states_along() -> None:
    """Its slot has other tokens now."""
    shape = replace(SHAPE, heads=64)
    cache = KvCache(shape, block_tokens=512, capacity_bytes=STATES.bytes + 512 * shape.token_bytes)
    for start in (0, 1000):
        ids = int32_bytes(range(start, start + 512))
        cache.store(ids, shape.empty(512), routes=shape.unknown_routes(512))
        assert cache.resumable(ids, limit_tokens=512).tokens == 0
        cache.store_states(ids, {512: row(1)})
        assert cache.resumable(ids, limit_tokens=512).tokens == 512


def test_prompt_is_cut_where_its_states_are_kept() -> None:
    """A prompt that shares the beginning gets the nearest place that is still to be computed, or
    that has been kept."""
    states = ReadStates(STATES, CPU)
    states.stop(8)
    pieces = list(states.pieces(0, 10, offset=5, begin=None))
    assert [piece.place for piece in pieces] == [slice(5, 13), slice(13, 15)]
    assert [piece.keep_1S is not None for piece in pieces] == [True, False]
    assert states.share(9, done=10) == 8
    assert states.share(12, done=10) == 12
    assert states.share(4, done=10) == 0
