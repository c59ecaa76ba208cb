"""Engines of the role both: one prefix cache for prompts and answers, steps between passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import ResourceExhausted
from forge.core.placement.chain_hashes import PromptChains
from forge.core.token_columns import int32_bytes
from services.inference.engines.base import CacheChange
from tests.contract import engines
from tests.contract.engines import (
    BLOCK_TOKENS,
    GREEDY,
    Answer,
    Pair,
    is_greedy,
    make_prompt,
    prompt_ids,
    published,
    reference,
)
from tests.contract.starts import serving
from tests.support.inference.hand_off import held_passes
from tests.support.inference.held_answers import held_answers
from tests.support.inference.transformers_answers import greedy_of

pytestmark = pytest.mark.matrix


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Pair]:
    """One engine that does both, with passes of 32 tokens."""
    async with serving(engines.embedded_both, tmp_path, pass_tokens=32) as started:
        yield started


async def test_next_turn_computes_only_its_new_tokens(both: Pair) -> None:
    """Over six turns prefill computes the new tokens, the last sampled one and part of a block; no
    keys and values of earlier turns move."""
    history = prompt_ids(60)
    known = 0
    for turn in range(6):
        answer = await both.sample(history)
        assert is_greedy(reference("qwen3"), history, answer.ids)
        assert answer.cached_tokens >= known - BLOCK_TOKENS
        assert answer.fetched_tokens <= BLOCK_TOKENS
        # All but the last sampled token have keys and values.
        known = len(history) + len(answer.ids) - 1
        history = history + answer.ids + prompt_ids(10 + turn, seed=turn)


async def test_long_prompt_is_read_between_the_steps_of_an_answer(both: Pair) -> None:
    """The answer gets a token per pass: one that lacks fewer tokens than the long prompt has passes
    ends before the prompt has its first token."""
    running, long = prompt_ids(20), make_prompt(prompt_ids(480, seed=1), GREEDY)
    began = asyncio.Event()

    async def note(_: Answer) -> None:
        began.set()

    sampling = replace(GREEDY, max_tokens=14)
    with held_answers(4) as held:
        answering = asyncio.create_task(both.sample(running, sampling, on_piece=note))
        await began.wait()
        with held_passes() as passes:
            reading = asyncio.create_task(both.prefill.prefill(long, hold_s=60))
            await passes.begun()
            held.free()
            passes.free()
            first = (await reading).first
        assert answering.done()
        answer = await answering
    both.prefill.release(long.request_id)
    model = reference("qwen3")
    assert is_greedy(model, running, answer.ids) and len(answer.ids) == 14
    assert is_greedy(model, prompt_ids(480, seed=1), list(first.ids))


async def test_hand_off_of_a_prefill_engine_is_sampled(both: Pair, tmp_path: Path) -> None:
    """Its answer is that of a prompt that the engine reads itself, and the next turn finds it."""
    model = reference("qwen3")
    async with engines.embedded(tmp_path) as other:
        await other.load(published(model), version=1)
        mixed = Pair(prefill=other.prefill, decode=both.decode)
        ids = prompt_ids(90, seed=3)
        answer = await mixed.sample(ids)
        assert answer.fetched_tokens == 90
        turn = ids + answer.ids + prompt_ids(5, seed=4)
        follow_up = await both.sample(turn)
    assert is_greedy(model, ids, answer.ids)
    assert is_greedy(model, turn, follow_up.ids)
    # 90 of the prompt and 15 of the answer were known.
    assert follow_up.cached_tokens == (90 + 15) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("engine", engines.EMBEDDED)
async def test_engine_reports_its_prefix_cache(engine: str, tmp_path: Path) -> None:
    """The content at first, then what is stored, removed and cleared, by chain hashes."""
    token_bytes = 3 * 2 * 2 * 16 * 4
    async with serving(engines.ENGINES[engine], tmp_path, cache_bytes=96 * token_bytes) as pair:
        one = replace(GREEDY, max_tokens=1)
        old, recent, newest = (prompt_ids(48, seed=n) for n in range(3))
        await pair.prefill.prefill(make_prompt(old, one), hold_s=60)
        reports: Any = pair.prefill.cache_reports  # type: ignore[attr-defined]
        present: set[bytes] = set()
        async with aclosing(reports.changes()) as changes:
            apply(present, await anext(changes))
            assert present == chains(old)
            for ids in (recent, newest):
                await pair.prefill.prefill(make_prompt(ids, one), hold_s=60)
            apply(present, await anext(changes))
            assert present == chains(recent) | chains(newest)
            await pair.prefill.load(published(reference("qwen3", seed=1)), version=2)
            apply(present, await anext(changes))
            assert not present


def chains(ids: list[int]) -> set[bytes]:
    return set(PromptChains(int32_bytes(ids)).of(BLOCK_TOKENS))


def apply(present: set[bytes], change: CacheChange) -> None:
    if change.anew:
        present.clear()
    present.difference_update(change.removed)
    present.update(change.stored)


@pytest.mark.parametrize("engine", engines.able("recomputes"))
async def test_recompute_sends_running_answers_back_at_a_swap(engine: str, tmp_path: Path) -> None:
    """With the tokens so far; read again, no key is left of the older weights. A request that
    begins after the swap is not sent back."""
    old, new = reference("qwen3"), reference("qwen3", seed=1)
    ids = prompt_ids(20)
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    seen: list[engines.Answer] = []

    async def swap_once(answer: engines.Answer) -> None:
        if not seen:
            seen.append(answer)
            await pair.load(published(new), version=2)
            held.free()

    async with engines.ENGINES[engine](tmp_path, recompute_on_update=True) as pair:
        await pair.load(published(old), version=1)
        with (
            held_answers(100) as held,
            pytest.raises(ResourceExhausted, match="is read again by weights 2"),
        ):
            await pair.sample(ids, replace(GREEDY, max_tokens=200), on_piece=swap_once)
        (cut,) = seen
        assert 0 < len(cut.ids) < 200 and set(cut.versions) == {1}
        assert list(cut.ids) == greedy_of(old, ids, len(cut.ids))
        again = [*ids, *cut.ids]
        rest = await pair.sample(again, on_piece=swap_once)
        assert rest.ids == greedy_of(new, again, 16) and set(rest.versions) == {2}
