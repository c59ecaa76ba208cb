"""Answers sampled with top_k and top_p: the record has what training needs to correct them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge.core.credit.rewards import RewardWeights
from forge.core.token_columns import float32_array, int32_bytes
from forge.v1 import common_pb2 as pb
from services.inference.codec import write_tokens
from services.inference.engines.base import Grammar, Reweighting, Sampling, Tokens
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.samples import build_samples
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

pytestmark = pytest.mark.matrix

RULES = CreditRules(weights=RewardWeights(alpha=0.0, beta=0.0, gamma=1.0))
CUTS = [
    replace(SAMPLED, top_p=0.5),
    replace(SAMPLED, top_k=4),
    replace(SAMPLED, top_k=9, top_p=0.7, temperature=0.6),
    replace(SAMPLED, min_p=0.3),
    replace(SAMPLED, reweighting=Reweighting(presence=2.0, frequency=1.5, repetition=1.3)),
    replace(SAMPLED, top_k=9, temperature=0.6, reweighting=Reweighting(bias=((3, 9.0), (5, -4.0)))),
]


@asynccontextmanager
async def started_with_tokenizer(engine: str, folder: Path) -> AsyncIterator[Pair]:
    save_tokenizer(folder)
    async with serving(engines.ENGINES[engine], folder) as started:
        yield started


@pytest.fixture(params=engines.able("penalties"))
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """With weights and a tokenizer."""
    async with started_with_tokenizer(request.param, tmp_path) as started:
        yield started


def behavior_logprobs(ids: list[int], answer: Answer, sampling: Sampling) -> list[float]:
    """As the trainer compares with them, of a turn that was recorded with these settings."""
    tokens = Tokens(
        ids=tuple(answer.ids),
        logprobs=tuple(answer.logprobs),
        versions=tuple(answer.versions),
        allowed=tuple(answer.allowed),
    )
    change = sampling.reweighting or Reweighting()
    turn = pb.Turn(
        parent_turn=-1,
        prompt_ids=int32_bytes(ids),
        sampled=write_tokens(tokens),
        finish_reason=pb.FINISH_REASON_LENGTH,
        temperature=1.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=change.presence,
        frequency_penalty=change.frequency,
        repetition_penalty=change.repetition if change.repetition != 1 else 0,
        logit_bias=bool(change.bias),
    )
    reward = pb.RewardEvent(event_id="r", kind=pb.REWARD_KIND_OUTCOME, value=1, turn_index=-1)
    rollouts = [
        pb.Trajectory(trajectory_id="t:0:0", turns=[turn], rewards=[reward]),
        pb.Trajectory(trajectory_id="t:0:1", turns=[turn]),
    ]
    sample, _ = build_samples([rollouts], RULES).samples
    return list(float32_array(sample.behavior_logprobs))


def whole_logprobs(ids: list[int], answer: Answer, temperature: float) -> list[float]:
    """Of the sampled tokens in the whole distribution, by one full forward."""
    logits = reference("qwen3")(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1]
    logprobs_TV = (logits / temperature).log_softmax(-1)
    return list(logprobs_TV.gather(1, torch.tensor(answer.ids)[:, None])[:, 0].tolist())


NAMES = ["top_p", "top_k", "both", "min_p", "penalties", "bias and top_k"]


@pytest.fixture(params=sorted({*engines.able("cuts")} & {*engines.able("shares")}))
async def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Of an engine that returns shares."""
    async with started_with_tokenizer(request.param, tmp_path) as started:
        yield started


@pytest.mark.parametrize("sampling", CUTS, ids=NAMES)
async def test_unchanged_weights_give_a_ratio_of_1(sharing: Pair, sampling: Sampling) -> None:
    """Training compares with the log-prob of the whole distribution, which belongs to the trained
    policy: a cut or a penalty does not change the policy."""
    ids = prompt_ids(20)
    answer = await sharing.sample(ids, sampling)
    found = behavior_logprobs(ids, answer, sampling)
    assert found == pytest.approx(whole_logprobs(ids, answer, sampling.temperature), abs=1e-4)
    # The distribution is another one, or this would hold without the record.
    assert max(map(abs, answer.allowed)) > 0.1


async def test_each_request_of_a_batch_has_its_own_kept_share(sharing: Pair) -> None:
    """Requests without a cut have no such column, and a greedy one has no share."""
    prompts = [prompt_ids(9 + n, seed=n) for n in range(4)]
    asked = [SAMPLED, replace(SAMPLED, top_k=3), replace(GREEDY, top_p=0.5), GREEDY]
    alone = [await sharing.sample(*request) for request in zip(prompts, asked, strict=True)]
    answers = await asyncio.gather(*map(sharing.sample, prompts, asked))
    free, cut, greedy, plain = answers
    assert free.allowed == [] == plain.allowed
    assert len(cut.allowed) == len(cut.ids) and max(cut.allowed) < 0
    assert cut.allowed == pytest.approx(alone[1].allowed, abs=1e-4)
    assert greedy.allowed == [0.0] * len(greedy.ids)


async def test_kept_share_covers_grammar_and_cut(sharing: Pair) -> None:
    """Of the whole distribution: the part left by both the grammar and the cut."""
    ids = prompt_ids(20)
    digit = Grammar(kind="regex", text="[0-9]{4}")
    held = replace(SAMPLED, grammar=digit, stop_ids=frozenset({END}), top_k=3)
    answer = await sharing.sample(ids, held)
    found = behavior_logprobs(ids, answer, held)
    assert found == pytest.approx(whole_logprobs(ids, answer, 1.0), abs=1e-4)


def greedy_with(ids: list[int], change: Reweighting, tokens: int) -> list[int]:
    """The greedy answer under a reweighting, token by token as it is defined."""
    model, answer = reference("qwen3"), list[int]()
    for _ in range(tokens):
        logits = model(torch.tensor([ids + answer])).logits[0, -1]
        for token, bias in change.bias:
            logits[token] += bias
        for token in set(ids + answer):
            by = change.repetition
            logits[token] = logits[token] / by if logits[token] > 0 else logits[token] * by
        for token in set(answer):
            logits[token] -= change.presence + change.frequency * answer.count(token)
        answer.append(int(logits.argmax()))
    return answer


@pytest.mark.parametrize(
    "change",
    [
        Reweighting(presence=1.5),
        Reweighting(frequency=0.7),
        Reweighting(repetition=1.4),
        Reweighting(bias=((7, 30.0),), frequency=2.0),
        Reweighting(bias=((7, 12.0), (9, 12.0)), repetition=1.5),
    ],
    ids=["presence", "frequency", "repetition", "bias and frequency", "bias and repetition"],
)
async def test_penalties_and_biases_have_their_definition(pair: Pair, change: Reweighting) -> None:
    """Biases come first, then repetition, then presence and frequency. These two count the answer,
    repetition the prompt, too; also where the request has moved to another worker, whose prompt has
    the beginning of the answer."""
    ids = prompt_ids(20)
    expected = greedy_with(ids, change, 16)
    whole = await pair.sample(ids, replace(GREEDY, reweighting=change))
    assert whole.ids == expected
    assert expected != greedy_with(ids, Reweighting(), 16)
    if "penalties" not in pair.capabilities.resumes and (change.presence or change.frequency):
        return
    rest = replace(change, answered_tokens=6)
    moved = await pair.sample(ids + expected[:6], replace(GREEDY, reweighting=rest, max_tokens=10))
    assert moved.ids == expected[6:]
