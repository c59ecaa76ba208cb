"""Requests that share parts of their prompts, many at a time, on every engine."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract import engines
from tests.contract.engines import (
    GREEDY,
    is_greedy,
    prompt_ids,
    published,
    reference,
)

_SLOW = ("tensorrt_llm", "tensorrt_llm_both")
"""Stand-ins that compute one request after the other: one seed of three."""
CASES = [
    pytest.param(name, seed, marks=() if name == "embedded" else pytest.mark.matrix)
    for name in engines.ENGINES
    for seed in range(1 if name in _SLOW else 3)
]


@pytest.mark.parametrize(("engine", "seed"), CASES)
async def test_groups_of_every_shape_answer_as_alone(
    engine: str, seed: int, tmp_path: Path
) -> None:
    """Nested and wide groups that come and go, some aborted: no request reads another's context."""
    model = reference("qwen3")
    rng = random.Random(seed)
    root = prompt_ids(rng.randint(60, 90), seed=seed)
    trees = [root, root + prompt_ids(70, seed=seed + 10), prompt_ids(130, seed=seed + 20)]
    sizes = [3, 20, 5]
    requests = [
        (
            shared + prompt_ids(rng.randint(0, 20), seed=rng.randint(0, 3)),
            replace(GREEDY, max_tokens=rng.randint(1, 40)),
        )
        for shared, size in zip(trees, sizes, strict=True)
        for _ in range(size)
    ]
    rng.shuffle(requests)

    async def maybe_leave(answer: engines.Answer) -> bool:
        return rng.random() < 0.8

    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    async with engines.ENGINES[engine](tmp_path, max_running=24) as pair:
        await pair.load(published(model), version=1)
        on_pieces = [maybe_leave if rng.random() < 0.2 else None for _ in requests]
        for _ in range(2):
            answers = await asyncio.gather(
                *(
                    pair.sample(ids, sampling, on_piece=on_piece)
                    for (ids, sampling), on_piece in zip(requests, on_pieces, strict=True)
                )
            )
            for (ids, sampling), answer in zip(requests, answers, strict=True):
                assert is_greedy(model, ids, answer.ids)
                assert answer.finish is None or len(answer.ids) == sampling.max_tokens
