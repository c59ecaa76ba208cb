"""Requests of every kind that move between workers, with the parameters that the router sends for
the rest of an answer: all that is recorded is that of one worker."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forge.core.token_columns import int32_array, int32_bytes
from forge.runtime.rpc.tokens import joined
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import Grammar, SamplingParams
from services.inference import codec
from services.inference.engines.base import ModelLimits, Tokens
from services.inference.router.fleet.workers import Engine
from services.inference.router.request.answer import RoutedAnswer
from tests.contract import engines
from tests.contract.engines import (
    CONTEXT_TOKENS,
    END,
    VOCABULARY,
    Answer,
    Pair,
    draftable,
    prompt_ids,
    published,
    save_tokenizer,
    with_heads,
)

pytestmark = [
    pytest.mark.matrix,
    # Engines that others cannot continue at any token have their own tests.
    pytest.mark.skipif(not engines.EMBEDDED, reason="of the embedded engine"),
    pytest.mark.asyncio(loop_scope="module"),
]
LIMITS = ModelLimits(context_tokens=CONTEXT_TOKENS, vocabulary=VOCABULARY)
PROMPT = prompt_ids(30)
WORKER = Engine(role="both")
MOST = 40
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cuts": {"top_p": 0.8, "top_k": 20, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": {5: 4.0}},
    "repetition": {"repetition_penalty": 1.3, "temperature": 0.0},
    "grammar": {"grammar": Grammar(regex="[a-z0-9 ]{20,30}"), "stop_token_ids": [END]},
    "least length": {"min_tokens": 20, "stop_token_ids": [*range(0, VOCABULARY, 4)]},
    "stop tokens": {"stop_token_ids": [*range(12)]},
    "likeliest": {"top_logprobs": 3},
    "all": {
        "grammar": Grammar(regex="[a-z]{30}"),
        "stop_token_ids": [END],
        "min_tokens": 9,
        "top_k": 30,
        "top_logprobs": 2,
        "frequency_penalty": 0.4,
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=engines.EMBEDDED)
async def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[list[Pair]]:
    """The first one without drafts, the second one with some."""
    folder: Path = tmp_path_factory.mktemp("model")
    engines.CONFIGS["llama"].save_pretrained(folder)
    save_tokenizer(folder)
    start, drafts = engines.EMBEDDED[request.param], {"draft_tokens": 2, "adaptive_drafts": False}
    async with start(folder) as plain, start(folder, **drafts) as drafting:
        for pair in (plain, drafting):
            await pair.load(with_heads(published(draftable())), version=1)
        yield [plain, drafting]


async def routed(workers: list[Pair], sampling: SamplingParams, rng: random.Random) -> RoutedAnswer:
    """The answer of workers that a request leaves after a few tokens each, as the router has it."""
    request = pb.SampleRequest(prompt_ids=int32_bytes(PROMPT), sampling=sampling)
    prompt = codec.read_prompt(request, LIMITS, seed=1)
    answer = RoutedAnswer(request, prompt, context_tokens=CONTEXT_TOKENS)
    while not answer.end_if_complete():
        leave_after = rng.randint(1, 12)

        async def leave(part: Answer, most: int = leave_after) -> bool:
            return len(part.ids) < most

        rest = codec.read_sampling(answer.rest(), seed=1)
        worker = rng.choice(workers)
        part = await worker.sample(list(int32_array(answer.ids)), rest, on_piece=leave)
        answer.take(codec.write_tokens(columns_of(part)), WORKER)
    return answer


def columns_of(answer: Answer) -> Tokens:
    return Tokens(
        ids=tuple(answer.ids),
        logprobs=tuple(answer.logprobs),
        versions=tuple(answer.versions),
        allowed=tuple(answer.allowed),
        top=tuple(answer.top),
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_moved_answer_has_the_columns_of_one_worker(workers: list[Pair], kind: str) -> None:
    """Wherever it moves, and however often."""
    for seed in range(3):
        rng = random.Random(seed)
        sampling = SamplingParams(
            **{"temperature": 1.0, "max_tokens": MOST, "seed": seed, **KINDS[kind]}
        )
        alone = await workers[0].sample(PROMPT, codec.read_sampling(sampling, seed=1))
        answer = await routed(workers, sampling, rng)
        found = codec.read_tokens(joined(answer.flush()))
        assert list(found.ids) == alone.ids
        assert answer.finish is alone.finish
        assert list(found.versions) == alone.versions
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert found.allowed == pytest.approx(alone.allowed, abs=1e-4)
        assert [[token for token, _ in top] for top in found.top] == [
            [token for token, _ in top] for top in alone.top
        ]
