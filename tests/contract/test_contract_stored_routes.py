"""Experts in the KV store, where decode has found a part of the prompt's last block cached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract import engines
from tests.contract.engines import GREEDY, prompt_ids, reference
from tests.contract.test_contract_routes import check, stored_experts


@pytest.mark.parametrize(
    "engine",
    engines.or_skipped(engines.EMBEDDED, "the engine vllm has no store of keys and values"),
)
async def test_experts_of_a_cached_part_are_stored_with_the_last_block(
    engine: str, tmp_path: Path
) -> None:
    """An answer stores the block with the end of its prompt, 64 to 80: the hand-off has the experts
    from 72 on, the cache those before."""
    model, ids = reference("qwen3_moe"), prompt_ids(78)
    started = stored_experts(engines.EMBEDDED[engine], tmp_path)
    async with started() as pair:
        await pair.sample(ids[:73])
        first = await pair.sample(ids)
        assert first.fetched_tokens == 6
    async with started() as pair:
        further = [*ids, *first.ids, 7, 8]
        answer = await pair.sample(further, replace(GREEDY, max_tokens=4, routes_from=0))
    assert answer.cached_tokens == 80
    check(answer, model, further, start=0)
