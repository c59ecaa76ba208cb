"""The prompts that the engine holds until decode has them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from forge.core.errors import InvalidArgument
from services.inference.engines.tensorrt_llm.arguments import Role
from tests.contract.engines import GREEDY, make_prompt, prompt_ids
from tests.support.inference.tensorrt_llm import load, started
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
async def test_id_of_a_held_prompt_is_refused(
    behaviour: Behaviour, model_path: Path, role: Role
) -> None:
    """During its read and while it is held: a second prompt would take its place, and the first
    would stay in memory."""
    async with started(model_path, role) as engine:
        await load(engine)
        prompt = make_prompt(prompt_ids(40), GREEDY)
        reading = asyncio.create_task(engine.prefill(prompt, hold_s=60))
        await asyncio.sleep(0)
        other = replace(prompt, ids=make_prompt(prompt_ids(50), GREEDY).ids)
        with pytest.raises(InvalidArgument, match="request_id"):
            await engine.prefill(other, hold_s=60)
        await reading
        with pytest.raises(InvalidArgument, match="held prompt"):
            await engine.prefill(other, hold_s=60)
        held = await engine.fetch_kv(prompt.request_id, from_token=0)
        assert held.tokens == prompt.tokens
        engine.release(prompt.request_id)
        await engine.prefill(other, hold_s=60)
        engine.release(prompt.request_id)
        await engine.idle()
