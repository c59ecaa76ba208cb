"""Which running sequences get a shared prefix."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.inference.engines.embedded.kv.shared_prefixes import SharedPrefix, SharedPrefixes
from tests.contract import engines

_PLANT = SharedPrefixes._plant


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[SharedPrefix]:
    """Collects new shared prefixes; `clear` drops those of the check at the start."""
    found: list[SharedPrefix] = []

    def plant(prefixes: SharedPrefixes, *given: Any) -> SharedPrefix | None:
        shared = _PLANT(prefixes, *given)
        found.extend([shared] if shared else [])
        return shared

    monkeypatch.setattr(SharedPrefixes, "_plant", plant)
    return found


@pytest.mark.parametrize("turns", [1, 2])
async def test_sequence_alone_gets_no_shared_prefix(
    tmp_path: Path, planted: list[SharedPrefix], turns: int
) -> None:
    """A cached prompt that no other request has is read with the sequence's own tokens."""
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    async with engines.ENGINES["both"](tmp_path) as pair:
        await pair.load(engines.published(engines.reference("qwen3")), version=1)
        planted.clear()
        ids = engines.prompt_ids(100)
        for _ in range(turns):
            ids += (await pair.sample(ids)).ids
    assert planted == []


async def test_equal_prompts_share_one_prefix(tmp_path: Path, planted: list[SharedPrefix]) -> None:
    """Requests with the same prompt that run together have one shared prefix."""
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    async with engines.ENGINES["both"](tmp_path) as pair:
        await pair.load(engines.published(engines.reference("qwen3")), version=1)
        planted.clear()
        ids = engines.prompt_ids(100)
        await asyncio.gather(*(pair.sample(ids) for _ in range(3)))
    assert len(planted) == 1
