"""Answers with a least length: no stop token before it, and the share of the distribution."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge.core.errors import InvalidArgument
from services.inference.engines.base import Finish, Grammar
from tests.contract import engines
from tests.contract.engines import (
    END,
    SAMPLED,
    Pair,
    prompt_ids,
    reference,
    save_tokenizer,
)
from tests.contract.starts import serving

STOPS = frozenset(range(100))
"""So many that an answer without a least length ends with its first tokens."""
HELD = replace(SAMPLED, stop_ids=STOPS, min_tokens=5, max_tokens=40)


@pytest.fixture(params=engines.able("min_tokens"))
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """With weights and a tokenizer."""
    save_tokenizer(tmp_path)
    async with serving(engines.ENGINES[request.param], tmp_path) as started:
        yield started


async def test_answer_has_its_least_length(pair: Pair) -> None:
    """Before it no stop token is sampled, the first token included; then any may end it."""
    ids = prompt_ids(20)
    answers = [await pair.sample(ids, replace(HELD, seed=seed)) for seed in range(6)]
    for answer in answers:
        assert answer.finish is Finish.STOP
        assert not STOPS & {*answer.ids[:5]}
        assert answer.ids[-1] in STOPS and len(answer.ids) > 5
    assert min(len(answer.ids) for answer in answers) < 10


async def test_end_of_the_context_ends_an_answer_before_its_least_length(pair: Pair) -> None:
    """With all tokens that fit."""
    ids = prompt_ids(engines.CONTEXT_TOKENS - 5)
    answer = await pair.sample(ids, replace(HELD, min_tokens=10))
    assert len(answer.ids) == 5
    assert answer.finish is Finish.LENGTH


async def test_kept_share_restores_log_probs_of_the_whole_distribution(pair: Pair) -> None:
    """As with a grammar: log-prob plus share is the log-prob without a least length."""
    engines.require(pair.capabilities.shares, "shares")
    ids = prompt_ids(20)
    answer = await pair.sample(ids, HELD)
    logits = reference("qwen3")(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1]
    whole = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0].tolist()
    found = [sum(pair) for pair in zip(answer.logprobs, answer.allowed, strict=True)]
    assert found == pytest.approx(whole, abs=1e-4)
    assert min(answer.allowed[:5]) < -0.1


async def test_grammar_shorter_than_the_least_length_is_an_error(pair: Pair) -> None:
    """Neither limit is dropped silently."""
    digit = Grammar(kind="regex", text="[0-9]{2}")
    both = replace(HELD, grammar=digit, stop_ids=frozenset({END}))
    with pytest.raises(InvalidArgument, match="min_tokens"):
        await pair.sample(prompt_ids(20), both)
