"""Recorded experts: those with which each token of prompt and answer was computed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge.core.routes import RouteSpan
from forge.rl.routing import RoutePass, find_routing, routed
from services.inference.engines.provider import KvStoreOptions
from tests.contract import engines
from tests.contract.engines import GREEDY, SAMPLED, Answer, Pair, prompt_ids, published, reference
from tests.support.inference.hand_off import joined
from tests.support.inference.held_answers import held_answers

pytestmark = pytest.mark.matrix


@pytest.fixture(params=engines.able("routed_experts"))
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    engines.ROUTED.save_pretrained(tmp_path)
    async with engines.ENGINES[request.param](tmp_path) as started:
        await started.load(published(reference("qwen3_moe")), version=1)
        yield started


def chosen(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """[tokens, layers, top_k] experts by one full forward, sorted."""
    find_routing(model, lambda: model(torch.tensor([[1, 2]])))
    with routed(passed := RoutePass()):
        model(torch.tensor([ids]))
    return passed.choice().sort(-1).values.numpy()


def rows(spans: list[RouteSpan]) -> np.ndarray[Any, Any]:
    """[tokens, layers, top_k] experts of consecutive spans, sorted."""
    for before, after in pairwise(spans):
        assert before.end == after.start
    column = spans[0].routes
    ids = b"".join(one.routes.ids for one in spans)
    return np.sort(np.frombuffer(ids, np.uint8).reshape(-1, column.layers, column.top_k), axis=-1)


def check(answer: Answer, model: Any, ids: list[int], *, start: int) -> None:
    """All rows from `start` on are there, but for the last token; few differ, by rounding."""
    assert answer.routes[0].start == start
    found, expected = rows(answer.routes), chosen(model, ids + answer.ids[:-1])[start:]
    assert found.shape == expected.shape == (len(ids) + len(answer.ids) - 1 - start, 2, 2)
    assert (found != expected).any((1, 2)).sum() <= 1


def stored_experts(
    start: Callable[..., AbstractAsyncContextManager[Pair]], folder: Path
) -> Callable[[], AbstractAsyncContextManager[Pair]]:
    """Each call starts an engine with experts anew, with one store of keys and values."""
    store = KvStoreOptions(directory=str(folder / "kv"), max_bytes=64 << 20, block_tokens=16)
    engines.ROUTED.save_pretrained(folder / "model")

    @asynccontextmanager
    async def started() -> AsyncIterator[Pair]:
        async with start(folder / "model", kv_store=store) as pair:
            await pair.load(published(reference("qwen3_moe")), version=1)
            yield pair
            await pair.prefill.close()
            if not pair.is_one:
                await pair.decode.close()

    return started


async def test_experts_are_those_of_a_full_forward(pair: Pair) -> None:
    """Of prompt and answer, also where keys and values come from the prefix cache: of another
    prompt, and of an answer that the next prompt contains."""
    assert pair.capabilities.routed_experts
    model, ids = reference("qwen3_moe"), prompt_ids(21)
    asked = replace(GREEDY, max_tokens=20, routes_from=0)
    first = await pair.sample(ids, asked)
    check(first, model, ids, start=0)
    check(await pair.sample(ids[:17] + ids, asked), model, ids[:17] + ids, start=0)
    further = [*ids, *first.ids, 7, 8]
    known = len(ids) + len(first.ids) - 1
    streamed = replace(SAMPLED, max_tokens=9, routes_from=known)

    async def go_on(_: Answer) -> bool:
        return True

    check(await pair.sample(further, streamed, on_piece=go_on), model, further, start=known)
    check(await pair.sample(further, replace(asked, max_tokens=1)), model, further, start=0)
    assert not (await pair.sample(ids)).routes


async def test_requests_of_a_batch_have_their_own_experts(pair: Pair) -> None:
    """More of them than run at once, of several lengths, from several tokens on, some cached; one
    does not ask, and one ends before its first token."""
    model = reference("qwen3_moe")
    prompts = [prompt_ids(9 + 13 * n, seed=n % 3) for n in range(8)]
    asked = [replace(GREEDY, max_tokens=6 + n, routes_from=5 * n) for n in range(8)]
    asked[3] = replace(GREEDY, max_tokens=9)
    gone = asyncio.ensure_future(pair.sample(prompts[7], asked[7]))
    await asyncio.sleep(0)
    gone.cancel()
    answers = await asyncio.gather(*(map(pair.sample, prompts, asked)))
    for ids, sampling, answer in zip(prompts, asked, answers, strict=True):
        if sampling.routes_from is None:
            assert not answer.routes
        else:
            check(answer, model, ids, start=sampling.routes_from)


async def test_experts_of_an_answer_follow_its_weights(pair: Pair) -> None:
    """New weights in mid-answer choose for the tokens that they compute, and the old ones for those
    before."""
    ids, asked = prompt_ids(40), replace(GREEDY, max_tokens=24, routes_from=0)
    swapped: list[int] = []

    async def swap(answer: Answer) -> bool:
        if len(answer.ids) >= 4 and not swapped:
            swapped.append(len(answer.ids))
            await pair.load(published(reference("qwen3_moe", seed=1)), version=2)
            held.free()
        return True

    with held_answers(12) as held:
        answer = await pair.sample(ids, asked, on_piece=swap)
    old = len(ids) + answer.versions.count(1) - 1
    assert len(ids) < old < len(ids) + len(answer.ids) - 1
    found, all_ids = rows(answer.routes), ids + answer.ids[:-1]
    expected = chosen(reference("qwen3_moe"), all_ids)[:old]
    assert (found[:old] != expected).any((1, 2)).sum() <= 1
    # Over keys and values of the old weights, which no full forward has.
    assert (found[old:] != chosen(reference("qwen3_moe"), all_ids)[old:]).any((1, 2)).sum() > 1


@pytest.mark.parametrize(
    "engine",
    engines.or_skipped(engines.SEPARATE, "the engine vllm has no store of keys and values"),
)
@pytest.mark.parametrize("over_a_wire", [True, False])
async def test_experts_are_stored_with_keys_and_values(
    engine: str, over_a_wire: bool, tmp_path: Path
) -> None:
    """A restarted engine has the experts of prompt and answer from the store; those of the block
    with the end of the prompt, which decode stores, come with the hand-off."""
    model, ids = reference("qwen3_moe"), prompt_ids(70)
    started = stored_experts(engines.SEPARATE[engine], tmp_path)
    async with started() as pair, joined(pair) as workers:
        first = await (workers.sample(ids) if over_a_wire else pair.sample(ids))
    async with started() as pair:
        further = [*ids, *first.ids, 7, 8]
        answer = await pair.sample(further, replace(GREEDY, max_tokens=4, routes_from=0))
    assert answer.cached_tokens == 80
    check(answer, model, further, start=0)
