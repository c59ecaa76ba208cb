"""vLLM on two devices of one worker, here two processes that share each layer on a CPU.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.provider import EngineOptions
from tests.contract import engines
from tests.contract.engines import (
    GREEDY,
    is_greedy,
    make_prompt,
    prompt_ids,
    published,
    reference,
    save_tokenizer,
)

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


async def test_two_devices_serve_each_version_as_one(tmp_path: Path) -> None:
    """Each process loads its part of the weights from the same memory."""
    await import_module("tests.contract.vllm_engine").stop()
    provider: Any = import_module("services.inference.engines.vllm.provider")
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    options = EngineOptions(
        model_path=str(tmp_path),
        dtype="float32",
        block_tokens=engines.BLOCK_TOKENS,
        kv_bytes=16 << 20,
        cache_bytes=0,
        max_running=4,
        request_timeout_s=600.0,
        extra=PARALLEL,
    )
    system = ActorSystem("parallel")
    engine = await provider.start_aggregated(system, options)
    prompts = [prompt_ids(40, seed=seed) for seed in range(4)]

    async def answer(ids: list[int]) -> list[int]:
        pieces = engine.generate(make_prompt(ids, GREEDY))
        return [token async for piece in pieces for token in piece.tokens.ids]

    try:
        for version in (1, 2):
            model = reference("qwen3", seed=version)
            await engine.load(published(model), version=version)
            answers = await asyncio.gather(*map(answer, prompts))
            for ids, found in zip(prompts, answers, strict=True):
                assert is_greedy(model, ids, found)
    finally:
        await engine.close()
        await system.stop()
