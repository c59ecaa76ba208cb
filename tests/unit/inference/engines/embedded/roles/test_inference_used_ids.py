"""Requests with one id: an actor knows requests by their ids alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from forge.core.errors import InvalidArgument
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import KvSpan
from services.inference.engines.embedded.engine import EmbeddedBoth
from services.inference.engines.provider import EngineOptions
from tests.contract import engines
from tests.contract.engines import GREEDY, make_prompt, prompt_ids, published, reference


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[EmbeddedBoth]:
    engines.CONFIGS["qwen3"].save_pretrained(tmp_path)
    actors = ActorSystem("ids")
    options = EngineOptions(model_path=str(tmp_path), dtype="float32", request_timeout_s=60.0)
    found = await EmbeddedBoth.start(actors, options)
    await found.load(published(reference("qwen3")), version=1)
    yield found
    await found.close()
    await actors.stop()


async def test_second_request_with_an_id_in_use_is_refused(both: EmbeddedBoth) -> None:
    """In each role and state; the first is answered, and nothing of the second stays."""
    prompt = make_prompt(prompt_ids(40), GREEDY)
    reads = await asyncio.gather(
        both.prefill(prompt, hold_s=60.0), both.prefill(prompt, hold_s=60.0), return_exceptions=True
    )
    assert [isinstance(one, InvalidArgument) for one in reads] == [False, True]
    with pytest.raises(InvalidArgument, match="held"):
        await both.prefill(prompt, hold_s=60.0)
    assert not isinstance(reads[0], BaseException)
    first = reads[0].first
    may_fetch, fetches = asyncio.Event(), asyncio.Event()

    async def fetch(from_token: int) -> KvSpan:
        fetches.set()
        await may_fetch.wait()
        return await both.local_kv(prompt.request_id, from_token=from_token)

    async def answer() -> list[int]:
        ids = list(first.ids)
        async with aclosing(both.decode(prompt, first, fetch, stream=False)) as pieces:
            async for piece in pieces:
                ids += piece.tokens.ids
        return ids

    running = asyncio.create_task(answer())
    await fetches.wait()
    with pytest.raises(InvalidArgument, match="in use"):
        await answer()
    may_fetch.set()
    ids = await running
    assert engines.is_greedy(reference("qwen3"), prompt_ids(40), ids)
    both.release(prompt.request_id)
    async with asyncio.timeout(60):
        await both.idle()
