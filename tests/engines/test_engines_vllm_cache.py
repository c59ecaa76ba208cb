"""The prefix cache of vLLM as routers see it: by its events, with gaps.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from forge.core.placement.chain_hashes import PromptChains
from forge.core.token_columns import int32_bytes
from tests.contract import engines
from tests.contract.engines import BLOCK_TOKENS, Pair, prompt_ids, published, reference
from tests.contract.starts import serving
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
TOKENS = 64
"""Of each prompt: whole blocks of vLLM."""


class Cached:
    """What a router knows, kept from the changes."""

    def __init__(self, pair: Pair) -> None:
        self._reports: Any = pair.prefill.cache_reports  # type: ignore[attr-defined]
        engine: Any = pair.prefill
        self.follower: Any = engine.engine._follower

    async def chains(self) -> set[bytes]:
        async with aclosing(self._reports.changes()) as changes:
            return set((await anext(changes)).stored)

    async def become(self, *prompts: list[int]) -> None:
        """Returns once exactly these prompts are known, beside their answers."""
        wanted = set().union(*map(chains, prompts))

        async def fits() -> bool:
            return await self.chains() == wanted

        await until(fits)


def chains(ids: list[int]) -> set[bytes]:
    return set(PromptChains(int32_bytes(ids)).of(BLOCK_TOKENS))


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with serving(engines.ENGINES["vllm"], tmp_path) as started:
        yield started


def lose_next(follower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch of events does not arrive."""
    arrive = follower._next
    lost: list[Any] = []

    async def arrive_later() -> Any:
        frames = await arrive()
        if not lost:
            lost.append(frames)
            frames = await arrive()
        return frames

    monkeypatch.setattr(follower, "_next", arrive_later)


async def test_prompts_are_known_until_the_weights_change(pair: Pair) -> None:
    """By chain hashes of the router's blocks. What an answer under way stores after the change has
    keys of older weights, and is not known."""
    cached = Cached(pair)
    one, other = prompt_ids(TOKENS, seed=1), prompt_ids(TOKENS, seed=2)
    await pair.sample(one)
    await cached.become(one)
    await pair.sample(other)
    await cached.become(one, other)
    swapped = False

    async def swap_once(_: Any) -> None:
        nonlocal swapped
        if not swapped:
            swapped = True
            await pair.load(published(reference("qwen3", seed=1)), version=2)
            await cached.become()

    greedy = replace(engines.GREEDY, max_tokens=100)
    await pair.sample(prompt_ids(TOKENS, seed=3), greedy, on_piece=swap_once)
    await pair.sample(one)
    await cached.become(one)


async def test_lost_events_are_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next event, which has a later number than expected."""
    cached = Cached(pair)
    prompts = [prompt_ids(TOKENS, seed=seed) for seed in range(10, 13)]
    await pair.sample(prompts[0])
    await cached.become(prompts[0])
    lose_next(cached.follower, monkeypatch)
    # The follower already waits for one.
    for ids in prompts[1:]:
        await pair.sample(ids)
    later = prompt_ids(TOKENS, seed=13)
    await pair.sample(later)
    await cached.become(*prompts, later)


async def test_events_lost_for_good_restart_the_report(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is known that may be gone; a prompt that is asked for again is known again, though
    vLLM stores none of its blocks again."""
    cached = Cached(pair)
    one, other, third, last = (prompt_ids(TOKENS, seed=seed) for seed in range(20, 24))

    async def has_none() -> None:
        return

    monkeypatch.setattr(cached.follower, "_replay", has_none)
    await pair.sample(one)
    await cached.become(one)
    lose_next(cached.follower, monkeypatch)
    await pair.sample(other)
    await pair.sample(third)
    await pair.sample(last)
    known = await _settled(cached, chains(last))
    assert not chains(one) & known
    again = await pair.sample(one)
    assert again.cached_tokens == TOKENS - engines.CACHED_BLOCK_TOKENS
    await until(lambda: _knows(cached, one))


async def test_unreadable_event_restarts_the_report(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with it; the events behind it are read."""
    cached = Cached(pair)
    events: Any = cached.follower.events
    apply, unreadable = events.apply, list[bytes]()

    def fail_once(payload: bytes) -> None:
        if not unreadable:
            unreadable.append(payload)
            raise ValueError("a block without tokens")
        apply(payload)

    monkeypatch.setattr(events, "apply", fail_once)
    one, other = prompt_ids(TOKENS, seed=30), prompt_ids(TOKENS, seed=31)
    await pair.sample(one)
    await until(lambda: bool(unreadable))
    await pair.sample(other)
    await until(lambda: _knows(cached, other))
    assert events.reports_reused


async def _settled(cached: Cached, wanted: set[bytes]) -> set[bytes]:
    async def there() -> bool:
        return wanted <= await cached.chains()

    await until(there)
    return await cached.chains()


async def _knows(cached: Cached, ids: list[int]) -> bool:
    known = await cached.chains()
    return bool(known & chains(ids))
