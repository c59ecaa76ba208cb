"""Experts in the KV store, where decode has found a part of the prompt's last block cached."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.inference.engines.provider import KvStoreOptions
from tests.contract import engines
from tests.contract.engines import GREEDY, Pair, prompt_ids, published, reference
from tests.contract.test_contract_routes import check


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
    folder = tmp_path / "model"
    engines.ROUTED.save_pretrained(folder)
    store = KvStoreOptions(directory=str(tmp_path / "kv"), max_bytes=64 << 20, block_tokens=16)

    @asynccontextmanager
    async def started() -> AsyncIterator[Pair]:
        async with engines.EMBEDDED[engine](folder, kv_store=store) as pair:
            await pair.load(published(model), version=1)
            yield pair
            await pair.prefill.close()
            if not pair.is_one:
                await pair.decode.close()

    async with started() as pair:
        await pair.sample(ids[:73])
        first = await pair.sample(ids)
        assert first.fetched_tokens == 6
    async with started() as pair:
        further = [*ids, *first.ids, 7, 8]
        answer = await pair.sample(further, replace(GREEDY, max_tokens=4, routes_from=0))
    assert answer.cached_tokens == 80
    check(answer, model, further, start=0)
