"""What every engine must do when its memory is full: keep within it, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from forge.core.errors import NotFound, ResourceExhausted
from services.inference.engines.base import Prompt
from services.inference.engines.embedded.model.policy import Policy
from tests.contract import engines
from tests.contract.engines import (
    GREEDY,
    Answer,
    is_greedy,
    prompt_ids,
    published,
    reference,
)
from tests.contract.starts import StartInFolder, start_in
from tests.support.inference.held_answers import held_answers

pytestmark = pytest.mark.matrix

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
"""Of the model's keys and values: layers, two, heads, their size, float32."""


@pytest.fixture(params=engines.EMBEDDED)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> StartInFolder:
    """Starts an engine on the Qwen3-type model, without weights."""
    return start_in(tmp_path, engines.EMBEDDED[request.param])


@pytest.fixture(params=engines.SEPARATE)
def start_separate(request: pytest.FixtureRequest, tmp_path: Path) -> StartInFolder:
    """Starts two engines, each with all of the memory."""
    return start_in(tmp_path, engines.SEPARATE[request.param])


async def test_prefix_cache_is_bounded(start: StartInFolder) -> None:
    """The least recently used prefix is evicted from a full cache."""
    async with start(cache_bytes=96 * TOKEN_BYTES) as pair:
        await pair.load(published(reference("qwen3")), version=1)
        old, recent, newest = (prompt_ids(48, seed=n) for n in range(3))
        for ids in (old, recent, newest):
            await pair.sample(ids, replace(GREEDY, max_tokens=1))
        assert (await pair.sample(newest)).cached_tokens == 40
        assert (await pair.sample(old)).cached_tokens == 0


async def at_once(samples: Iterable[Coroutine[Any, Any, Answer]]) -> list[Any]:
    """The answer or the error of each; none samples before all have come."""
    with held_answers(1) as held:
        calls = [asyncio.create_task(sample) for sample in samples]
        await held.has(len(calls))
        held.free()
        return await asyncio.gather(*calls, return_exceptions=True)


async def test_youngest_request_is_preempted_when_memory_is_full(start: StartInFolder) -> None:
    """Older requests finish, and the youngest gets a retryable error."""
    async with start(kv_bytes=(256 + 512) * TOKEN_BYTES) as pair:
        await pair.load(published(reference("qwen3")), version=1)
        long = replace(GREEDY, max_tokens=400)
        outcomes = await at_once(pair.sample(prompt_ids(20, seed=n), long) for n in range(3))
    assert any(isinstance(outcome, ResourceExhausted) for outcome in outcomes)
    assert any(isinstance(outcome, engines.Answer) for outcome in outcomes)


@pytest.mark.parametrize("group", [3, 4, 5])
async def test_preempted_request_leaves_the_others_whole(start: StartInFolder, group: int) -> None:
    """A group whose rollouts outgrow their rows in the same step: the oldest finish as if alone."""
    model = reference("qwen3")
    async with start(kv_bytes=7 * 64 * TOKEN_BYTES) as pair:
        await pair.load(published(model), version=1)
        long = replace(GREEDY, max_tokens=100)
        outcomes = await at_once(pair.sample(prompt_ids(40), long) for _ in range(group))
    answers = [outcome for outcome in outcomes if isinstance(outcome, engines.Answer)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, ResourceExhausted)]
    assert len(answers) + len(refused) == group and answers
    # Extents of a device may fit one after the other, where rows of slabs do not.
    assert refused or engines.DEVICE != "cpu"
    assert all(is_greedy(model, prompt_ids(40), answer.ids) for answer in answers)


async def test_prompts_wait_for_memory(start_separate: StartInFolder) -> None:
    """Of many at once, no more are prefilled than can be held; release, expiry and cancellation
    make room, in the order of arrival."""
    async with start_separate(kv_bytes=220 * TOKEN_BYTES) as pair, asyncio.timeout(60):
        await pair.load(published(reference("qwen3")), version=1)

        def read(name: str, *, hold_s: float = 60.0) -> asyncio.Task[Any]:
            ids = np.asarray(prompt_ids(100, seed=ord(name)), dtype="<i4").tobytes()
            prompt = Prompt(request_id=name, ids=ids, sampling=GREEDY)
            return asyncio.create_task(pair.prefill.prefill(prompt, hold_s=hold_s))

        first, second, third = read("a"), read("b"), read("c", hold_s=0.1)
        leaver, last = read("d"), read("e")
        await asyncio.gather(first, second)
        assert not any(waiting.done() for waiting in (third, leaver, last))
        leaver.cancel()
        pair.prefill.release("a")
        await third
        # The third is held for a moment and never fetched; the second stays.
        await last
        with pytest.raises(NotFound):
            await pair.prefill.fetch_kv("c", from_token=0)
        await pair.prefill.fetch_kv("b", from_token=0)


@pytest.mark.parametrize(("tokens", "warned"), [(512, 0), (511, 2)])
async def test_memory_below_one_context_is_refused_at_start(
    start_separate: StartInFolder, tokens: int, warned: int
) -> None:
    """By prefill and by decode, with the needed size."""
    with capture_logs() as logged:
        async with start_separate(kv_bytes=tokens * TOKEN_BYTES):
            pass
    told = [line for line in logged if line["event"] == "context_exceeds_kv_mib"]
    assert len(told) == warned
    assert all(line["context_tokens"] == engines.CONTEXT_TOKENS for line in told)


async def test_equal_prompts_use_memory_once(start_separate: StartInFolder) -> None:
    """The first turns of a group are computed and held once."""
    async with start_separate(kv_bytes=120 * TOKEN_BYTES) as pair, asyncio.timeout(60):
        await pair.load(published(reference("qwen3")), version=1)
        ids = np.asarray(prompt_ids(100), dtype="<i4").tobytes()
        prompts = [Prompt(request_id=f"{n}", ids=ids, sampling=GREEDY) for n in range(8)]
        read = [pair.prefill.prefill(prompt, hold_s=60) for prompt in prompts]
        assert len(await asyncio.gather(*read)) == 8
        spans = [await pair.prefill.fetch_kv(each.request_id, from_token=0) for each in prompts]
    assert len({span.data for span in spans}) == 1


async def test_weights_without_memory_to_stage_leave_those_before(
    start: StartInFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused with a retryable error, and may be loaded later."""
    old, new = (reference("qwen3", seed=seed) for seed in (0, 1))
    async with start() as pair:
        await pair.load(published(old), version=1)
        with monkeypatch.context() as patched:

            def stage(policy: Policy, *given: Any, **named: Any) -> Any:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

            patched.setattr(Policy, "stage", stage)
            with pytest.raises(ResourceExhausted, match="weights 2: no memory"):
                await pair.load(published(new), version=2)
        assert is_greedy(old, prompt_ids(20), (await pair.sample(prompt_ids(20))).ids)
        await pair.load(published(new), version=2)
        assert is_greedy(new, prompt_ids(20), (await pair.sample(prompt_ids(20))).ids)


async def test_prompt_larger_than_memory_is_refused(start: StartInFolder) -> None:
    """At once, with both sizes."""
    async with start(kv_bytes=99 * TOKEN_BYTES) as pair:
        await pair.load(published(reference("qwen3")), version=1)
        with pytest.raises(ResourceExhausted, match=f"{100 * TOKEN_BYTES} bytes"):
            await pair.sample(prompt_ids(100))
