"""vLLM on two devices of one worker, here two processes that share each layer on a CPU.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.contract import engines
from tests.contract.engines import (
    GREEDY,
    is_greedy,
    make_prompt,
    prompt_ids,
    published,
    reference,
)

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


async def test_two_devices_serve_each_version_as_one(tmp_path: Path) -> None:
    """Each process loads its part of the weights from the same memory."""
    vllm: Any = import_module("tests.contract.vllm_engine")
    prompts = [prompt_ids(40, seed=seed) for seed in range(4)]
    start, config = vllm.VllmEngine.start, engines.CONFIGS["qwen3"]
    async with vllm.started(tmp_path, config, start, extra=PARALLEL) as (engine,):

        async def answer(ids: list[int]) -> list[int]:
            pieces = engine.generate(make_prompt(ids, GREEDY))
            return [token async for piece in pieces for token in piece.tokens.ids]

        for version in (1, 2):
            model = reference("qwen3", seed=version)
            await engine.load(published(model), version=version)
            answers = await asyncio.gather(*map(answer, prompts))
            for ids, found in zip(prompts, answers, strict=True):
                assert is_greedy(model, ids, found)
