"""Weights that change while a request is between its two engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import engines
from tests.contract.engines import prompt_ids, published, reference
from tests.contract.starts import serving
from tests.support.inference.transformers_answers import greedy_of


@pytest.mark.parametrize("engine", engines.SEPARATE)
async def test_prompt_of_two_weight_versions_is_never_cached(engine: str, tmp_path: Path) -> None:
    """Decode had a part from old weights and fetched a part from new ones: the prompt belongs to
    neither, although the new ones are in service by then."""
    new = reference("qwen3", seed=1)
    ids = prompt_ids(60)
    async with serving(engines.SEPARATE[engine], tmp_path) as pair:
        await pair.sample(ids)
        await pair.prefill.load(published(new), version=2)

        async def swap() -> None:
            await pair.decode.load(published(new), version=2)

        mixed = await pair.sample(ids, on_fetch=swap)
        assert mixed.fetched_tokens < 60
        after = await pair.sample(ids)
        assert after.fetched_tokens == 60
        assert after.ids == greedy_of(new, ids, 16)
