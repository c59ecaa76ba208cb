"""Models with recurrent layers: their states are where the keys and values are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from forge.core.errors import ConfigError, ResourceExhausted
from services.inference.engines.base import RefusedHandOff
from tests.contract import engines
from tests.contract.engines import (
    BLOCK_TOKENS,
    DEVICE,
    SAMPLED,
    Answer,
    Pair,
    make_prompt,
    prompt_ids,
    published,
)
from tests.contract.recurrent_models import RECURRENT, reference
from tests.support.inference.hand_off import joined
from tests.support.inference.held_answers import held_answers

pytestmark = pytest.mark.matrix

ERROR_NATS = 2e-5 if DEVICE == "cpu" else 5e-5
GREEDY = replace(engines.GREEDY, top_logprobs=1)
STATE_BYTES = 4096
"""Of one sequence, float32: two layers with 64 inputs of 4 tokens, and 4 states of 8 by 8."""
CASES = [
    (role, family)
    for role, family in (
        ("embedded", "qwen3_next"),
        ("embedded", "mamba2"),
        ("both", "falcon_h1"),
        ("both", "minimax"),
    )
    if role in engines.EMBEDDED
]


@pytest_asyncio.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Pair, PreTrainedModel]]:
    """An engine with passes of 32 tokens, and its model."""
    role, family = request.param
    folder = tmp_path_factory.mktemp(family)
    RECURRENT[family].save_pretrained(folder)
    model = reference(family)
    async with engines.EMBEDDED[role](folder, pass_tokens=32) as pair:
        await pair.load(published(model), version=1)
        yield pair, model


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """The model with linear attention."""
    RECURRENT["qwen3_next"].save_pretrained(tmp_path)
    return tmp_path


def check(model: PreTrainedModel, ids: list[int], answer: Answer) -> list[int]:
    """All log-probs of an answer are those of one forward, whose likeliest tokens this returns."""
    whole = torch.tensor([ids + answer.ids])
    logits_NV = model(input_ids=whole, use_cache=False).logits[0, len(ids) - 1 : -1]
    own_N = logits_NV.log_softmax(-1).gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
    # Log-probs of greedy tokens are 0 in the distribution that they are sampled from.
    found = [top[0][1] for top in answer.top] or answer.logprobs
    assert (own_N - torch.tensor(found)).abs().max() < ERROR_NATS
    likeliest_N: list[int] = logits_NV.argmax(-1).tolist()
    return likeliest_N


async def check_greedy(pair: Pair, model: PreTrainedModel, ids: list[int]) -> Answer:
    """Sample a greedy answer, and check it."""
    answer = await pair.sample(ids, GREEDY)
    assert check(model, ids, answer) == answer.ids
    return answer


async def test_turns_and_forks_compute_what_the_model_computes(
    served: tuple[Pair, PreTrainedModel],
) -> None:
    """Prompts of all lengths beside each other, a group with one prompt, and further turns, which
    begin behind the last whole block that has states: of the answer, where one engine does both."""
    pair, model = served
    prompts = [prompt_ids(tokens, seed=tokens) for tokens in (1, 70, 3, 41)]
    answers = await asyncio.gather(*(check_greedy(pair, model, ids) for ids in prompts))
    group = [replace(SAMPLED, seed=seed) for seed in range(3)]
    forks = await asyncio.gather(*(pair.sample(prompts[1], sampling) for sampling in group))
    assert len({tuple(fork.ids) for fork in forks}) == 3
    for fork in forks:
        check(model, prompts[1], fork)
        assert fork.cached_tokens >= 64
    history = prompts[1] + answers[1].ids
    for turn in range(2):
        prompt = history + prompt_ids(20, seed=turn)
        answer = await check_greedy(pair, model, prompt)
        known = len(history) - 1 if pair.is_one or turn else 70
        assert answer.cached_tokens == (known if pair.is_one else known - 1) // BLOCK_TOKENS * 8
        history, known = prompt + answer.ids, len(prompt)
        if not pair.is_one:
            history = prompt


async def test_branches_and_moved_requests_continue_from_kept_states(
    served: tuple[Pair, PreTrainedModel],
) -> None:
    """Prompts that wait together compute their common prefix once. Of prompts that come one after
    the other, the second keeps the states where it parts, and the third resumes there. A moved
    request's tokens so far are a prompt; its draws depend on seed and position alone."""
    pair, model = served
    common = prompt_ids(45)
    branches = [common + prompt_ids(30, seed=seed) for seed in range(1, 3)]
    await asyncio.gather(*(check_greedy(pair, model, ids) for ids in branches))
    late = prompt_ids(50, seed=9)
    cached = []
    for seed in range(3, 6):
        ids = late + prompt_ids(30, seed=seed)
        cached.append((await check_greedy(pair, model, ids)).cached_tokens)
    assert cached == [0, 0, 48]
    stayed = await pair.sample(late, replace(SAMPLED, max_tokens=20))
    moved = await pair.sample(late + stayed.ids[:7], replace(SAMPLED, max_tokens=13))
    assert moved.ids == stayed.ids[7:]
    check(model, late + stayed.ids[:7], moved)


async def test_states_travel_behind_the_blocks_of_an_early_hand_off(model_path: Path) -> None:
    """Between real servicers: once, before the block that ends the prompt; so do the experts."""
    ids, model = prompt_ids(200), reference("qwen3_next")
    async with engines.embedded(model_path, pass_tokens=64) as pair, joined(pair) as workers:
        await pair.load(published(model), version=1)
        answer = await workers.sample(ids)
        assert engines.is_greedy(model, ids, answer.ids)
        *blocks, states, experts, last = workers.sender.sent
        assert blocks and all(block.slice.name == "kv" for block in blocks)
        assert (states.slice.name, states.slice.whole_bytes) == ("recurrent", STATE_BYTES)
        assert experts.slice.name == "experts"
        assert last.HasField("first")


@pytest.mark.parametrize("recompute", [False, True])
async def test_swap_drops_the_states_of_other_weights(model_path: Path, recompute: bool) -> None:
    """A running answer keeps its states, or is sent back; later prompts use no older state."""
    ids, long = prompt_ids(40), replace(GREEDY, max_tokens=60)
    newer = reference("qwen3_next", seed=1)
    async with engines.embedded_both(model_path, recompute_on_update=recompute) as pair:
        await pair.load(published(reference("qwen3_next")), version=1)
        swapped = asyncio.Event()

        async def swap(answer: Answer) -> None:
            if not swapped.is_set():
                swapped.set()
                await pair.load(published(newer), version=2)
                held.free()

        with held_answers(30) as held:
            if recompute:
                with pytest.raises(ResourceExhausted, match="is read again by weights 2"):
                    await pair.sample(ids, long, on_piece=swap)
            else:
                answer = await pair.sample(ids, long, on_piece=swap)
                assert len(answer.ids) == 60 and set(answer.versions) == {1, 2}
        assert (await check_greedy(pair, newer, ids)).cached_tokens == 0


async def test_memory_for_states_is_bounded(model_path: Path) -> None:
    """Requests without a row for their states wait, and a cache with room for one prompt forgets
    the other; all answers are right."""
    model = reference("qwen3_next")
    token_bytes = 2 * 2 * 16 * 4
    room = 512 * token_bytes + 2 * STATE_BYTES
    # A quarter of the memory is for held prompts.
    sizes = {"kv_bytes": 2 * room * 4 // 3 + 4, "cache_bytes": room}
    async with engines.embedded_both(model_path, **sizes) as pair:
        assert pair.decode.capacity == 2
        await pair.load(published(model), version=1)
        prompts = [prompt_ids(30 + seed, seed=seed) for seed in range(4)]
        await asyncio.gather(*(check_greedy(pair, model, ids) for ids in prompts))
        last = await check_greedy(pair, model, prompts[3])
        turn = await check_greedy(pair, model, prompts[3] + last.ids)
        assert turn.cached_tokens == 48
        assert (await pair.sample(prompts[0])).cached_tokens == 0


async def test_memory_below_the_states_of_one_request_is_refused(model_path: Path) -> None:
    """At the start, with the setting."""
    with pytest.raises(ConfigError, match=r"kv.mib: .* recurrent states of one request"):
        async with engines.embedded_both(model_path, kv_bytes=STATE_BYTES):
            pass


async def test_drafts_are_off_and_a_hand_off_without_states_is_refused(model_path: Path) -> None:
    """A rejected draft could not be taken back, and keys and values alone would be continued
    wrongly; other requests go on."""
    model = reference("qwen3_next")
    ids = prompt_ids(30)
    async with engines.embedded(model_path, draft_tokens=2, adaptive_drafts=False) as pair:
        assert not pair.capabilities.drafts
        await pair.load(engines.with_heads(published(model)), version=1)
        prompt = make_prompt(ids, GREEDY)
        first = (await pair.prefill.prefill(prompt, hold_s=60)).first

        async def without_states(from_token: int) -> Any:
            span = await pair.prefill.fetch_kv(prompt.request_id, from_token=from_token)
            return replace(span, recurrent=b"")

        with pytest.raises(RefusedHandOff, match="0 bytes of recurrent states"):
            async for _ in pair.decode.decode(prompt, first, without_states, stream=False):
                pass
        await check_greedy(pair, model, ids)
