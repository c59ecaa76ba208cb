"""What every engine tells of the likeliest tokens: as many as each request asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.inference.engines.base import Grammar
from tests.contract import engines
from tests.contract.engines import (
    END,
    GREEDY,
    SAMPLED,
    Answer,
    Pair,
    prompt_ids,
    reference,
    save_tokenizer,
)
from tests.contract.starts import serving


@pytest.fixture(params=engines.able("top_logprobs"))
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """With weights and a tokenizer."""
    save_tokenizer(tmp_path)
    async with serving(engines.ENGINES[request.param], tmp_path) as started:
        yield started


def logprobs_by_forward(ids: list[int], answer: Answer, **cut: Any) -> torch.Tensor:
    """The distribution at each sampled token, by one full forward."""
    logits = reference("qwen3")(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1]
    logits = logits / cut.get("temperature", 1.0)
    if top_k := cut.get("top_k"):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    found: torch.Tensor = logits.log_softmax(-1)
    return found


def check(answer: Answer, logprobs: torch.Tensor, count: int) -> None:
    expected = logprobs.topk(count)
    assert len(answer.top) == len(answer.ids)
    for top, ids, values in zip(answer.top, expected.indices, expected.values, strict=True):
        assert [token for token, _ in top] == ids.tolist()
        assert [logprob for _, logprob in top] == pytest.approx(values.tolist(), abs=1e-4)


async def test_top_logprobs_equal_those_of_a_full_forward(pair: Pair) -> None:
    """Ids, order and log-probs at the sampling temperature; greedy, those at temperature 1."""
    ids = prompt_ids(20)
    for sampling in (SAMPLED, replace(SAMPLED, temperature=0.6, seed=3), GREEDY):
        answer = await pair.sample(ids, replace(sampling, top_logprobs=20))
        check(answer, logprobs_by_forward(ids, answer, temperature=sampling.temperature or 1), 20)
        for token, logprob, top in zip(answer.ids, answer.logprobs, answer.top, strict=True):
            if sampling.temperature and token in dict(top):
                assert dict(top)[token] == logprob
            elif not sampling.temperature:
                assert (top[0][0], logprob) == (token, 0.0)


async def test_top_logprobs_change_no_draw(pair: Pair) -> None:
    """In one batch each request has its requested number, and the same tokens as alone."""
    prompts = [prompt_ids(9 + n, seed=n) for n in range(4)]
    plain = [replace(SAMPLED, max_tokens=24, seed=n) for n in range(3)] + [GREEDY]
    alone = [await pair.sample(*request) for request in zip(prompts, plain, strict=True)]
    counts = (0, 1, 5, 2)
    asked = [replace(one, top_logprobs=n) for one, n in zip(plain, counts, strict=True)]
    answers = await asyncio.gather(*map(pair.sample, prompts, asked))
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    assert answers[0].top == []
    for answer, count in zip(answers[1:], counts[1:], strict=True):
        assert {len(top) for top in answer.top} == {count}
        assert len(answer.top) == len(answer.ids)


async def test_top_logprobs_omit_tokens_of_cuts(pair: Pair) -> None:
    """A token that is cut off has no probability among the top ones either."""
    engines.require(pair.capabilities.cuts, "cuts")
    ids = prompt_ids(20)
    cut = await pair.sample(ids, replace(SAMPLED, top_k=3, top_logprobs=5))
    check(replace(cut, top=[top[:3] for top in cut.top]), logprobs_by_forward(ids, cut, top_k=3), 3)
    assert {logprob for top in cut.top for _, logprob in top[3:]} == {float("-inf")}


async def test_top_logprobs_omit_tokens_of_grammars(pair: Pair) -> None:
    """Nor has a forbidden one."""
    engines.require("regex" in pair.capabilities.grammars, "grammars")
    ids = prompt_ids(20)
    digit = Grammar(kind="regex", text="[0-9]")
    held = replace(SAMPLED, grammar=digit, stop_ids=frozenset({END}), top_logprobs=20)
    answer = await pair.sample(ids, held)
    finite = [[token for token, logprob in top if logprob > -1e9] for top in answer.top]
    assert [len(allowed) for allowed in finite] == [10, 1]
    assert (len(answer.ids), answer.ids[0] in finite[0], finite[1]) == (2, True, [END])
