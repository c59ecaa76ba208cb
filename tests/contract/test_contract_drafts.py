"""Drafts: the answers are those without any, whatever a request asks for."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from structlog.testing import capture_logs
from transformers import LlamaConfig

from services.inference.engines.base import (
    Grammar,
    KvSpan,
    Reweighting,
    Sampling,
)
from services.inference.engines.embedded.metrics import ACCEPTED, DRAFTED
from services.inference.engines.embedded.speculation import draft_vocabulary, drafter
from services.inference.engines.embedded.speculation.draft_vocabulary import DraftVocabulary
from services.inference.engines.provider import KvStoreOptions
from tests.contract import engines
from tests.contract.engines import (
    END,
    GREEDY,
    SAMPLED,
    VOCABULARY,
    Answer,
    Pair,
    draftable,
    embedded,
    prompt_ids,
    published,
    save_tokenizer,
    with_heads,
)

pytestmark = pytest.mark.matrix

HEADS = 3
PART = 190
"""Tokens of the vocabulary, where only a part is drafted."""
SAMPLES = int(os.environ.get("FORGE_DRAFT_SAMPLES", "3000"))
"""`make drafts` takes 100,000."""
STOP = frozenset({END})
JSON = Grammar(
    kind="json_schema", text='{"type": "array", "items": {"type": "integer"}, "minItems": 3}'
)
REQUESTS: dict[str, Sampling] = {
    "greedy": GREEDY,
    "sampled": replace(SAMPLED, max_tokens=48),
    "cold": replace(SAMPLED, temperature=0.6, max_tokens=48),
    "cuts": replace(SAMPLED, temperature=0.9, top_p=0.8, top_k=20, max_tokens=48),
    "min_p": replace(SAMPLED, min_p=0.1, max_tokens=48),
    "penalties": replace(
        SAMPLED,
        max_tokens=48,
        reweighting=Reweighting(
            presence=0.5, frequency=0.7, repetition=1.3, bias=((5, 4.0), (9, -100.0))
        ),
    ),
    "greedy with penalties": replace(
        GREEDY, max_tokens=48, reweighting=Reweighting(frequency=1.5, repetition=1.2)
    ),
    "stop tokens": replace(SAMPLED, max_tokens=200, stop_ids=frozenset(range(12))),
    "least length": replace(
        SAMPLED, max_tokens=60, min_tokens=30, stop_ids=frozenset(range(0, VOCABULARY, 4))
    ),
    "grammar": replace(SAMPLED, temperature=0.8, max_tokens=60, stop_ids=STOP, grammar=JSON),
    "greedy grammar": replace(GREEDY, max_tokens=40, stop_ids=STOP, grammar=JSON),
    "top log-probs": replace(SAMPLED, max_tokens=24, top_logprobs=3),
    "one token": replace(SAMPLED, max_tokens=1),
    "two tokens": replace(SAMPLED, max_tokens=2),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    engines.CONFIGS["llama"].save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest_asyncio.fixture(scope="module")
async def plain(model_path: Path) -> AsyncIterator[Pair]:
    """Without drafts, with the same weights."""
    async with embedded(model_path) as pair:
        await pair.load(with_heads(published(draftable()), count=HEADS), version=1)
        yield pair


def draft_a_part(patch: pytest.MonkeyPatch) -> None:
    """Engines draft a part of the vocabulary, as of a large one, and choose it often."""
    patch.setattr(drafter, "LEAST_VOCABULARY", VOCABULARY)
    patch.setattr(drafter, "DraftVocabulary", partial(DraftVocabulary, most=PART))
    patch.setattr(draft_vocabulary, "REFRESH_TOKENS", 16)


@pytest_asyncio.fixture(scope="module", params=["whole vocabulary", "part"])
async def drafting(model_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Always with three drafts."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "part":
            draft_a_part(patch)
        async with embedded(model_path, draft_tokens=HEADS, adaptive_drafts=False) as pair:
            await pair.load(with_heads(published(draftable()), count=HEADS), version=1)
            yield pair


def counted(metric: Any) -> float:
    return float(sum(metric.labels(str(head + 1))._value.get() for head in range(HEADS)))


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.ids == expected.ids
    assert answer.finish is expected.finish
    assert answer.versions == expected.versions
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer.allowed == pytest.approx(expected.allowed, abs=1e-4)
    assert [[token for token, _ in top] for top in answer.top] == [
        [token for token, _ in top] for top in expected.top
    ]


@pytest.mark.parametrize("name", REQUESTS)
async def test_answer_is_that_without_drafts(plain: Pair, drafting: Pair, name: str) -> None:
    """Tokens, log-probs and what is recorded with them, for several prompts and seeds."""
    for seed in range(3):
        ids, sampling = prompt_ids(5 + 9 * seed, seed=seed), replace(REQUESTS[name], seed=seed)
        assert_same(await drafting.sample(ids, sampling), await plain.sample(ids, sampling))


async def test_drafts_are_accepted_and_rejected(drafting: Pair) -> None:
    """Many of each, so that these tests exercise both."""
    drafted, accepted = counted(DRAFTED), counted(ACCEPTED)
    for seed in range(4):
        await drafting.sample(prompt_ids(20), replace(SAMPLED, max_tokens=64, seed=seed))
    drafted, accepted = counted(DRAFTED) - drafted, counted(ACCEPTED) - accepted
    assert 0.15 * drafted < accepted < 0.9 * drafted


async def test_batch_of_all_kinds_of_requests_answers_as_alone(plain: Pair, drafting: Pair) -> None:
    """Rows with other acceptance, other lengths and shared prefixes change no answer."""
    common = prompt_ids(72, seed=1)
    requests = [
        (common + prompt_ids(1 + number, seed=number), replace(sampling, seed=number))
        for number, sampling in enumerate([*REQUESTS.values(), *REQUESTS.values()])
    ]
    requests += [(prompt_ids(3 + 40 * n, seed=n), replace(SAMPLED, seed=n)) for n in range(8)]
    alone = [await plain.sample(*request) for request in requests]
    together = await asyncio.gather(*(drafting.sample(*request) for request in requests))
    for answer, expected in zip(together, alone, strict=True):
        assert_same(answer, expected)


async def test_only_accepted_tokens_are_cached(drafting: Pair) -> None:
    """The next turn finds keys and values of all tokens of the answer but the last, no others, and
    gets the model's log-probs from them."""
    model = draftable()
    ids = prompt_ids(60)
    first = await drafting.sample(ids, replace(SAMPLED, max_tokens=37))
    longer = ids + first.ids + prompt_ids(4, seed=9)
    second = await drafting.sample(longer, replace(SAMPLED, max_tokens=12))
    # 96 of the 97 tokens have been computed: 12 blocks of 8.
    assert second.fetched_tokens == len(longer) - 96
    logits = model(torch.tensor([longer + second.ids])).logits[0, len(longer) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(second.ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(second.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("engine", engines.EMBEDDED)
async def test_kv_store_gets_accepted_tokens_alone(
    engine: str, model_path: Path, tmp_path: Path, plain: Pair
) -> None:
    """Another engine reads them in place of its own; in both ways to run the roles."""
    store = KvStoreOptions(directory=str(tmp_path / "kv"), max_bytes=64 << 20, block_tokens=16)
    weights = with_heads(published(draftable()))
    options: dict[str, Any] = {"kv_store": store, "draft_tokens": HEADS, "adaptive_drafts": False}
    ids = prompt_ids(40)
    async with engines.EMBEDDED[engine](model_path, **options) as pair:
        await pair.load(weights, version=1)
        first = await pair.sample(ids, replace(SAMPLED, max_tokens=60))
        # All blocks are written at the end.
        await pair.prefill.close()
        if not pair.is_one:
            await pair.decode.close()
    assert first.ids == (await plain.sample(ids, replace(SAMPLED, max_tokens=60))).ids
    turn = ids + first.ids + prompt_ids(3, seed=2)
    async with engines.EMBEDDED[engine](model_path, **options) as pair:
        await pair.load(weights, version=1)
        second = await pair.sample(turn, replace(SAMPLED, max_tokens=30))
    # 40 of the prompt and 59 of the answer are computed: six blocks of 16.
    assert second.cached_tokens == 96
    assert_same(second, await plain.sample(turn, replace(SAMPLED, max_tokens=30)))


async def test_context_and_memory_end_as_without_drafts(model_path: Path, plain: Pair) -> None:
    """At the last token of the context, and in slabs with room for a few short sequences."""
    ids, sampling = prompt_ids(engines.CONTEXT_TOKENS - 30), replace(SAMPLED, max_tokens=500)
    async with embedded(model_path, draft_tokens=HEADS, adaptive_drafts=False) as pair:
        await pair.load(with_heads(published(draftable())), version=1)
        assert_same(await pair.sample(ids, sampling), await plain.sample(ids, sampling))
    token_bytes = 2 * 3 * 2 * 16 * 4
    # A device keeps 32 tokens for padded rows, and a sequence's drafts lie in its own extent.
    room = 64 if engines.DEVICE == "cpu" else 80
    async with embedded(
        model_path, draft_tokens=HEADS, adaptive_drafts=False, kv_bytes=room * 8 * token_bytes
    ) as pair:
        await pair.load(with_heads(published(draftable())), version=1)
        sampling = replace(SAMPLED, max_tokens=50)
        prompts = [prompt_ids(14, seed=n) for n in range(8)]
        answers = await asyncio.gather(*(pair.sample(one, sampling) for one in prompts))
        for one, answer in zip(prompts, answers, strict=True):
            assert_same(answer, await plain.sample(one, sampling))


async def test_hand_off_carries_the_last_hidden_state(drafting: Pair, plain: Pair) -> None:
    """That of the prompt's last token, if heads are served; without it the answer is the same."""
    # No other test has it: nothing of it is cached.
    ids = prompt_ids(20, seed=77)
    prompt = engines.make_prompt(ids, SAMPLED)
    prefilled = await drafting.prefill.prefill(prompt, hold_s=60)
    span = await drafting.prefill.fetch_kv(prompt.request_id, from_token=0)
    drafting.prefill.release(prompt.request_id)
    states = draftable()(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    carried = torch.frombuffer(bytearray(span.last_state), dtype=torch.float32)
    assert torch.allclose(carried, states[0, -1], atol=1e-4)

    async def bare(_: int) -> KvSpan:
        return replace(span, last_state=b"other")

    answer = Answer()
    answer.add(prefilled.first)
    async for piece in drafting.decode.decode(prompt, prefilled.first, bare, stream=False):
        answer.add(piece.tokens)
    assert answer.ids == (await plain.sample(ids, SAMPLED)).ids


async def test_heads_draft_in_bfloat16(model_path: Path) -> None:
    """With the states of the hand-off in that type; every step of an answer drafts."""
    options: dict[str, Any] = {"draft_tokens": 1, "adaptive_drafts": False, "dtype": "bfloat16"}
    async with embedded(model_path, **options) as pair:
        await pair.load(with_heads(published(draftable())), version=1)
        prompt = engines.make_prompt(prompt_ids(20), SAMPLED)
        await pair.prefill.prefill(prompt, hold_s=60)
        span = await pair.prefill.fetch_kv(prompt.request_id, from_token=0)
        assert len(span.last_state) == 64 * 2
        drafted, accepted = counted(DRAFTED), counted(ACCEPTED)
        answer = await pair.sample(prompt_ids(30), replace(SAMPLED, max_tokens=40))
        drafted, accepted = counted(DRAFTED) - drafted, counted(ACCEPTED) - accepted
    # 39 tokens of decode: one for each step, one for each accepted draft. The last has no draft
    # where one token is left.
    assert drafted in (len(answer.ids) - 1 - accepted, len(answer.ids) - 2 - accepted)


async def test_heads_change_with_the_weights(model_path: Path) -> None:
    """In mid-answer, to other heads, heads that do not fit, and none; the drafts follow, the answer
    does not, and the log has one line for each change."""
    other = draftable(seed=1)
    sets = [
        with_heads(published(other), count=1),
        with_heads(published(other), channels=32),
        published(other),
        with_heads(published(other), count=5),
    ]
    with capture_logs() as logged:
        async with embedded(model_path, draft_tokens=HEADS, adaptive_drafts=False) as pair:
            await swap_in_mid_answer(pair, sets)
    reasons = [one["reason"] for one in logged if one["event"] == "draft_heads_not_served"]
    # Prefill and decode have a policy each.
    assert len(reasons) == 4
    assert sum("MTP heads do not fit" in reason for reason in reasons) == 2
    assert sum("no draft heads" in reason for reason in reasons) == 2
    assert sum(one["event"] == "draft_heads_served" for one in logged) == 6


@pytest.mark.skipif(engines.DEVICE != "cpu", reason="a GPU drafts the whole vocabulary")
async def test_part_of_the_vocabulary_follows_the_weights(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads draft with the served head's rows: with those of the weights before, no draft would
    equal the draws of a model whose head is the negative."""
    draft_a_part(monkeypatch)
    async with embedded(model_path, draft_tokens=1, adaptive_drafts=False) as pair:
        for version, sign in enumerate((1.0, -1.0), 1):
            model = draftable()
            model.get_output_embeddings().weight.data *= sign
            await pair.load(with_heads(published(model), count=1), version=version)
            drafted, accepted = counted(DRAFTED), counted(ACCEPTED)
            await pair.sample(prompt_ids(20), replace(SAMPLED, max_tokens=64))
            drafted, accepted = counted(DRAFTED) - drafted, counted(ACCEPTED) - accepted
            assert accepted > 0.2 * drafted


@pytest.mark.skipif(engines.DEVICE != "cpu", reason="a GPU drafts the whole vocabulary")
async def test_grammar_that_allows_no_drafted_token_gets_no_draft(
    model_path: Path, plain: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the grammar lie outside the part; the answer is that without drafts."""
    draft_a_part(monkeypatch)
    monkeypatch.setattr(drafter, "DraftVocabulary", partial(DraftVocabulary, most=20))
    monkeypatch.setattr(draft_vocabulary, "REFRESH_TOKENS", 1 << 20)
    grammar = Grammar(kind="regex", text="[a-z]{40}")
    ids = prompt_ids(12)
    async with embedded(model_path, draft_tokens=HEADS, adaptive_drafts=False) as pair:
        await pair.load(with_heads(published(draftable())), version=1)
        for temperature in (0.0, 0.8):
            sampling = replace(SAMPLED, temperature=temperature, stop_ids=STOP, grammar=grammar)
            drafted = counted(DRAFTED)
            answer = await pair.sample(ids, sampling)
            assert counted(DRAFTED) == drafted
            assert_same(answer, await plain.sample(ids, sampling))


async def swap_in_mid_answer(pair: Pair, sets: list[Any]) -> None:
    """To each of the sets; it drafts with the first and the last of them."""
    expected = None
    for number, tensors in enumerate(sets):
        await pair.load(with_heads(published(draftable())), version=2 * number + 1)
        before = counted(DRAFTED)

        async def swap(tensors: Any = tensors, version: int = 2 * number + 2) -> None:
            await pair.load(tensors, version=version)

        sampling = replace(SAMPLED, max_tokens=100)
        answer = await pair.sample(prompt_ids(30), sampling, on_fetch=swap)
        expected = expected or answer.ids
        assert answer.ids == expected
        assert answer.versions[-1] == 2 * number + 2
        assert (counted(DRAFTED) > before) == (number in (0, 3))


def exact_distribution(model: Any, ids: list[int], vocabulary: int) -> torch.Tensor:
    """Of the second to fourth token behind `ids`: [vocabulary ** 3]. The first one is prefill's."""
    words = torch.cartesian_prod(*[torch.arange(vocabulary)] * 4)
    rows = torch.cat([torch.tensor(ids).expand(len(words), -1), words], 1)
    logprobs = model(rows).logits.double().log_softmax(-1)[:, len(ids) - 1 : -1]
    joint: torch.Tensor = logprobs.gather(2, words[..., None])[..., 0].sum(-1).exp()
    return joint.view(vocabulary, -1).sum(0)


async def test_sampled_distribution_is_the_model_s_own(tmp_path: Path) -> None:
    """Chi-square of three successive tokens against the exact probabilities, with three drafts in
    each step, for answers of consecutive seeds."""
    vocabulary, ids = 8, [1, 5, 2, 7]
    config = LlamaConfig(**{**engines.CONFIGS["llama"].to_dict(), "vocab_size": vocabulary})
    config.save_pretrained(tmp_path)
    model = draftable(config)
    expected = exact_distribution(model, ids, vocabulary)
    counts: Counter[int] = Counter()
    drafted, accepted = counted(DRAFTED), counted(ACCEPTED)
    async with embedded(tmp_path, draft_tokens=HEADS, adaptive_drafts=False) as pair:
        await pair.load(with_heads(published(model)), version=1)
        for first in range(0, SAMPLES, 100):
            sampling = [replace(SAMPLED, max_tokens=5, seed=first + n) for n in range(100)]
            for answer in await asyncio.gather(*(pair.sample(ids, one) for one in sampling)):
                a, b, c = answer.ids[1:4]
                counts[(a * vocabulary + b) * vocabulary + c] += 1
    assert counted(ACCEPTED) - accepted > 0.2 * (counted(DRAFTED) - drafted)
    likely = expected * SAMPLES >= 5
    observed = torch.tensor([float(counts[word]) for word in range(vocabulary**3)])
    seen = torch.cat([observed[likely], observed[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * SAMPLES
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    degrees = torch.tensor(len(seen) - 1.0, dtype=torch.float64)
    chance = float(torch.special.gammaincc(degrees / 2, statistic / 2))
    print(f"chi-square over {SAMPLES} samples, {len(seen)} cells: p = {chance:.3f}")
    assert chance > 1e-3
