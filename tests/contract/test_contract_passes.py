"""Prefill passes of the embedded engine: how prompts share them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.contract import engines
from tests.contract.engines import (
    GREEDY,
    Pair,
    make_prompt,
    prompt_ids,
    published,
    reference,
)
from tests.contract.starts import StartInFolder, start_in
from tests.support.inference.hand_off import held_passes
from tests.support.inference.transformers_answers import greedy_of
from tests.support.runtime.waiting import settle


@pytest.fixture(params=engines.EMBEDDED)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> StartInFolder:
    """Starts the embedded engine on the same model."""
    return start_in(tmp_path, engines.EMBEDDED[request.param])


async def test_short_prompt_overtakes_a_long_one(start: StartInFolder) -> None:
    """It is answered while the long one is still being read; both are right."""
    firsts: dict[int, list[int]] = {}

    async def read(pair: Pair, ids: list[int]) -> None:
        prefilled = await pair.prefill.prefill(make_prompt(ids, GREEDY), hold_s=60)
        firsts[len(ids)] = list(prefilled.first.ids)

    async with start(pass_tokens=32) as pair:
        await pair.load(published(reference("qwen3")), version=1)
        prompts = [prompt_ids(480), prompt_ids(9, seed=1)]
        with held_passes() as passes:
            reading = asyncio.gather(*(read(pair, ids) for ids in prompts))
            await passes.begun()
            await settle()
            passes.free()
            await reading
    assert list(firsts) == [9, 480]
    assert firsts == {len(ids): greedy_of(reference("qwen3"), ids, 1) for ids in prompts}
