"""What every engine must do. A new engine joins by one entry in `engines.ENGINES`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forge.core.errors import NotFound, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.core.sampling_limits import MIN_TEMPERATURE
from services.inference.engines.base import Finish, UnfitWeights
from tests.contract import engines
from tests.contract.engines import (
    GREEDY,
    SAMPLED,
    Pair,
    is_greedy,
    prompt_ids,
    published,
    reference,
)
from tests.contract.starts import StartInFolder, serving, start_in
from tests.support.inference.hand_off import arriving_at_once
from tests.support.inference.held_answers import held_answers
from tests.support.inference.transformers_answers import greedy_of, logprobs_of
from tests.support.suite.matrix import usual


@pytest.fixture(params=usual(engines.ENGINES, "embedded"))
def start(request: pytest.FixtureRequest, tmp_path: Path) -> StartInFolder:
    """Starts an engine on the Qwen3-type model, without weights."""
    return start_in(tmp_path, engines.ENGINES[request.param])


@pytest.fixture
async def pair(start: StartInFolder) -> AsyncIterator[Pair]:
    async with start() as started:
        await started.load(published(reference("qwen3")), version=1)
        yield started


@pytest.fixture(params=engines.or_skipped(engines.SEPARATE, engines.ROLES_OF_VLLM))
async def separate(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two engines that hand over."""
    async with serving(engines.SEPARATE[request.param], tmp_path) as started:
        yield started


@pytest.fixture(
    params=usual(engines.APART, "embedded") or engines.or_skipped([], engines.ROLES_OF_VLLM)
)
async def apart(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two engines that hand over in any way."""
    async with serving(engines.APART[request.param], tmp_path) as started:
        yield started


@pytest.mark.parametrize("family", engines.CONFIGS)
@pytest.mark.parametrize("engine", usual(engines.ENGINES, "embedded"))
async def test_greedy_answer_equals_transformers_generate(
    engine: str, family: str, tmp_path: Path
) -> None:
    """Greedy answers equal `generate` token by token, for each family of models."""
    model = reference(family)
    engines.CONFIGS[family].save_pretrained(tmp_path)
    async with engines.ENGINES[engine](tmp_path) as pair:
        await pair.load(published(model), version=1)
        for tokens in (1, 7, 8, 9, 100):
            ids = prompt_ids(tokens, seed=tokens)
            answer = await pair.sample(ids)
            assert answer.ids == greedy_of(model, ids, 16)
            assert answer.finish is Finish.LENGTH


async def test_logprobs_equal_those_of_a_full_forward(pair: Pair) -> None:
    """Log-probs equal a full forward's to 1e-4, first token and later ones, at temperature 1."""
    model = reference("qwen3")
    for tokens in (3, 40, 150):
        ids = prompt_ids(tokens, seed=tokens)
        answer = await pair.sample(ids, replace(SAMPLED, max_tokens=32, seed=tokens))
        expected = logprobs_of(model, ids, answer.ids)
        assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)


async def test_logprobs_are_of_the_sampled_distribution(pair: Pair) -> None:
    """With temperature and top-k, log-probs are renormalised over the allowed tokens."""
    engines.require(pair.capabilities.cuts, "cuts")
    model = reference("qwen3")
    ids = prompt_ids(20)
    answer = await pair.sample(ids, replace(SAMPLED, temperature=0.7, top_k=5, seed=3))
    logits = model(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1] / 0.7
    kept = logits.topk(5, dim=-1)
    expected = kept.values.log_softmax(-1)
    for step, (token, logprob) in enumerate(zip(answer.ids, answer.logprobs, strict=True)):
        place = kept.indices[step].tolist().index(token)
        assert logprob == pytest.approx(expected[step, place].item(), abs=1e-4)


@pytest.mark.parametrize("temperature", [MIN_TEMPERATURE, 0.004, 5.0])
async def test_log_probs_are_of_the_temperature_of_the_request(
    pair: Pair, temperature: float
) -> None:
    """The lowest and very high ones, too: the record of the turn has the requested temperature. The
    model's logits are scaled, so that its distribution is as wide as usual."""
    model = reference("qwen3")
    model.model.norm.weight.data *= temperature
    await pair.load(published(model), version=2)
    ids = prompt_ids(20)
    asked = replace(SAMPLED, temperature=temperature, max_tokens=48)
    answer = await pair.sample(ids, asked)
    logits = model(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1] / temperature
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)
    # Drawn: the likeliest tokens alone would have few log-probs below it.
    assert expected.mean() < -0.5


async def test_prefix_cache_changes_no_result(pair: Pair) -> None:
    """The same prompt again, a longer one and a sibling get the same answers from the cache."""
    model = reference("qwen3")
    ids = prompt_ids(60)
    first = await pair.sample(ids)
    again = await pair.sample(ids)
    longer = ids + first.ids + prompt_ids(9, seed=5)
    follow_up = await pair.sample(longer)
    sibling = ids[:41] + prompt_ids(30, seed=6)
    forked = await pair.sample(sibling)
    assert first.ids == again.ids == greedy_of(model, ids, 16)
    assert follow_up.ids == greedy_of(model, longer, 16)
    assert forked.ids == greedy_of(model, sibling, 16)
    # TensorRT-LLM's count follows its events, which arrive later: see test_trtllm_cache_events.
    if not pair.capabilities.cache_events or pair.capabilities.engine == "tensorrt_llm":
        return
    block = engines.CACHED_BLOCK_TOKENS
    assert first.cached_tokens == 0
    assert again.cached_tokens == 59 // block * block
    # Of the answer all but the last token was computed.
    assert follow_up.cached_tokens == (75 if pair.is_one else 59) // block * block
    assert forked.cached_tokens == 41 // block * block


async def test_decode_fetches_only_missing_keys_and_values(separate: Pair) -> None:
    """A second turn moves no keys and values of the first turn, prompt or answer."""
    ids = prompt_ids(60)
    first = await separate.sample(ids)
    assert first.fetched_tokens == 60
    second = await separate.sample(ids + first.ids + prompt_ids(4, seed=9))
    # 60 prompt tokens and 15 of 16 sampled ones were computed: 9 blocks of 8.
    assert second.fetched_tokens == 80 - 72


async def test_simultaneous_requests_share_their_prompt(separate: Pair) -> None:
    """Requests of one batch compute and move their common prompt once, and answer as alone."""
    model = reference("qwen3")
    common = prompt_ids(64, seed=1)
    prompts = [common + prompt_ids(5 + n, seed=100 + n) for n in range(8)]
    answers = await asyncio.gather(*(separate.sample(ids) for ids in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.ids == greedy_of(model, ids, 16)
    assert sorted(answer.cached_tokens for answer in answers) == [0] + 7 * [64]
    assert sum(answer.fetched_tokens >= 64 for answer in answers) == 1


async def test_other_requests_of_a_batch_change_no_greedy_result(pair: Pair) -> None:
    """Alone or among others of all lengths, a request gets the same tokens."""
    prompts = [prompt_ids(tokens, seed=tokens) for tokens in (2, 5, 30, 31, 120, 250, 260, 400)]
    alone = [(await pair.sample(ids)).ids for ids in prompts]
    together = await asyncio.gather(*(pair.sample(ids) for ids in prompts))
    assert [answer.ids for answer in together] == alone


async def test_seed_determines_the_answer(pair: Pair) -> None:
    """Same seed, same tokens, in any batch; other seeds, other tokens."""
    ids = prompt_ids(20)
    seeded = replace(SAMPLED, seed=7)
    alone = await pair.sample(ids, seeded)
    others = [pair.sample(prompt_ids(40, seed=n), replace(SAMPLED, seed=n)) for n in range(6)]
    beside, *_ = await asyncio.gather(pair.sample(ids, seeded), *others)
    assert beside.ids == alone.ids
    other_seeds = [await pair.sample(ids, replace(SAMPLED, seed=n)) for n in range(3)]
    assert len({tuple(answer.ids) for answer in other_seeds}) == 3


async def test_continued_request_draws_the_same_tokens(pair: Pair) -> None:
    """Prefilling prompt and partial answer elsewhere gives the uninterrupted answer."""
    engines.require(pair.capabilities.draws == "positional", "draws by position")
    ids = prompt_ids(20)
    whole = await pair.sample(ids, replace(SAMPLED, seed=7, max_tokens=12))
    rest = await pair.sample(ids + whole.ids[:5], replace(SAMPLED, seed=7, max_tokens=7))
    assert whole.ids[5:] == rest.ids


async def test_prompts_beyond_one_pass_keep_their_seeds(start: StartInFolder) -> None:
    """Each in several passes beside the others: the answers are those alone."""
    async with start(pass_tokens=64) as pair:
        await pair.load(published(reference("qwen3")), version=1)
        prompts = [prompt_ids(150 + n, seed=n) for n in range(6)]
        asked = [replace(SAMPLED, seed=n) for n in range(6)]
        together = await asyncio.gather(*map(pair.sample, prompts, asked))
        alone = [await pair.sample(*request) for request in zip(prompts, asked, strict=True)]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]


async def test_prompts_longer_than_a_pass_are_prefilled_in_chunks(start: StartInFolder) -> None:
    """Chunked or not, shared or not, the answer is the same."""
    model = reference("qwen3")
    async with start(pass_tokens=37) as pair:
        await pair.load(published(model), version=1)
        common = prompt_ids(64, seed=1)
        prompts = [common + prompt_ids(5 + 9 * n, seed=100 + n) for n in range(8)]
        answers = await asyncio.gather(*(pair.sample(ids) for ids in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert is_greedy(model, ids, answer.ids)


async def test_stop_token_ends_the_answer_and_is_kept(pair: Pair) -> None:
    """It is the last sampled one."""
    ids = prompt_ids(20)
    free = await pair.sample(ids)
    stop = free.ids[5]
    stopped = await pair.sample(ids, replace(GREEDY, stop_ids=frozenset({stop})))
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert stopped.finish is Finish.STOP


async def test_answer_ends_at_the_context_limit(pair: Pair) -> None:
    """At its last position."""
    ids = prompt_ids(engines.CONTEXT_TOKENS - 5)
    answer = await pair.sample(ids, replace(GREEDY, max_tokens=100))
    assert len(answer.ids) == 5
    assert answer.finish is Finish.LENGTH


async def test_swap_in_mid_answer_changes_the_version_of_later_tokens(pair: Pair) -> None:
    """Every token has the version that sampled it, and is that version's choice."""
    old, new = reference("qwen3"), reference("qwen3", seed=1)
    ids = prompt_ids(20)
    swapped = asyncio.Event()

    async def swap_once(answer: engines.Answer) -> None:
        if not swapped.is_set():
            swapped.set()
            await pair.load(published(new), version=2)
            held.free()

    with held_answers(200) as held:
        answer = await pair.sample(ids, replace(GREEDY, max_tokens=400), on_piece=swap_once)
    assert answer.versions == sorted(answer.versions)
    assert set(answer.versions) == {1, 2}
    before = answer.versions.count(1)
    assert is_greedy(old, ids, answer.ids[:before])
    assert not is_greedy(old, ids, answer.ids)


async def test_prompt_whose_caller_has_left_is_read_no_further(start: StartInFolder) -> None:
    """The engine becomes idle, and serves others."""
    async with start(pass_tokens=8) as pair:
        await pair.load(published(reference("qwen3")), version=1)
        leaving = asyncio.create_task(pair.sample(prompt_ids(480)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        await pair.prefill.idle()
        ids = prompt_ids(20, seed=2)
        assert (await pair.sample(ids)).ids == greedy_of(reference("qwen3"), ids, 16)


async def test_new_weights_clear_the_prefix_cache(apart: Pair) -> None:
    """After a swap no answer uses keys of older weights."""
    new = reference("qwen3", seed=1)
    ids = prompt_ids(60)
    await apart.sample(ids)
    await apart.load(published(new), version=2)
    answer = await apart.sample(ids)
    assert answer.cached_tokens == 0
    assert answer.fetched_tokens == 60
    assert answer.ids == greedy_of(new, ids, 16)


async def test_keys_of_other_weights_are_never_cached(apart: Pair) -> None:
    """A decode engine with newer weights than the prefill engine continues, but caches nothing."""
    ids = prompt_ids(60)
    await apart.decode.load(published(reference("qwen3", seed=1)), version=2)
    first = await apart.sample(ids)
    second = await apart.sample(ids)
    assert first.versions == [1] + 15 * [2]
    assert second.fetched_tokens == 60


async def test_unfit_weights_change_nothing(pair: Pair) -> None:
    """Weights without a tensor, with an unknown one or another shape are refused whole."""
    ids = prompt_ids(20)
    before = await pair.sample(ids)
    fit = published(reference("qwen3", seed=1))
    name, tensor = next(iter(fit.items()))
    short = {key: value for key, value in fit.items() if key != name}
    odd = fit | {"odd": NamedTensor(name="odd", dtype="float32", shape=(1,), data=b"\0" * 4)}
    bent = fit | {name: replace(tensor, shape=(tensor.shape[1], tensor.shape[0]))}
    cut = fit | {name: replace(tensor, data=tensor.data[:-4])}
    for unfit in (short, odd, bent, cut):
        with pytest.raises(UnfitWeights):
            await pair.load(unfit, version=2)
    after = await pair.sample(ids)
    assert after.ids == before.ids
    assert set(after.versions) == {1}


async def test_abort_frees_the_slot(start: StartInFolder) -> None:
    """With one slot, the next request runs."""
    async with start(max_running=1) as pair:
        await pair.load(published(reference("qwen3")), version=1)

        async def leave(answer: engines.Answer) -> bool:
            return False

        await pair.sample(prompt_ids(20), replace(GREEDY, max_tokens=480), on_piece=leave)
        answer = await pair.sample(prompt_ids(30))
        assert len(answer.ids) == 16
        assert pair.decode.status().running == 0


async def test_more_requests_than_slots_all_finish(start: StartInFolder) -> None:
    """Requests wait for a slot and get the same answers as alone."""
    model = reference("qwen3")
    async with start(max_running=3) as pair:
        await pair.load(published(model), version=1)
        prompts = [prompt_ids(10 + n, seed=n) for n in range(10)]
        answers = await asyncio.gather(*(pair.sample(ids) for ids in prompts))
    assert [answer.ids for answer in answers] == [greedy_of(model, ids, 16) for ids in prompts]


async def test_released_prompt_is_not_found(pair: Pair) -> None:
    """Also one that was never prefilled."""
    pair.prefill.release("unheard-of")
    with pytest.raises(NotFound):
        await pair.prefill.fetch_kv("unheard-of", from_token=0)


async def test_held_prompt_is_unfinished_work(pair: Pair) -> None:
    """An operator's drain waits for the decode worker that fetches it."""
    prompt = engines.make_prompt(prompt_ids(20), GREEDY)
    await pair.prefill.prefill(prompt, hold_s=60)
    assert pair.prefill.status().running == 1
    pair.prefill.release(prompt.request_id)
    await pair.prefill.idle()
    assert pair.prefill.status().running == 0


async def test_request_without_weights_is_unavailable(start: StartInFolder) -> None:
    """Before the first weights a request is Unavailable."""
    async with start() as pair:
        with pytest.raises(Unavailable):
            await pair.sample(prompt_ids(5))
        assert pair.prefill.status().version == 0


async def test_equal_prompts_are_prefilled_once(pair: Pair) -> None:
    """Simultaneous rollouts of one prompt differ by their seeds only, and cost one prefill."""
    ids = prompt_ids(50)
    seeded = [replace(SAMPLED, seed=seed) for seed in range(6)]
    # The other libraries may compute equal prompts of a batch beside each other.
    is_embedded = pair.capabilities.engine == "embedded"
    async with arriving_at_once(pair.prefill) if is_embedded else nullcontext():
        together = asyncio.gather(*(pair.sample(ids, sampling) for sampling in seeded))
    answers = await together
    alone = [await pair.sample(ids, sampling) for sampling in seeded]
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    if is_embedded:
        assert sorted(answer.cached_tokens for answer in answers) == [0] + 5 * [50]
    expected = logprobs_of(reference("qwen3"), ids, answers[5].ids)
    assert torch.allclose(torch.tensor(answers[5].logprobs), expected, atol=1e-4)
