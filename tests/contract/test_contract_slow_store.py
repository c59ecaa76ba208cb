"""A file system under the KV store that hangs: what waits for it, and for how long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract import engines
from tests.contract.engines import GREEDY, is_greedy, prompt_ids, published, reference
from tests.contract.test_contract_kv_store import PROMPT, STORED, block_files, pair_with_store

_LONG_S = 60.0
WAIT = "services.inference.engines.embedded.roles.stored_reads.WAIT_S"


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Replace a file by a pipe without a writer: each open of it waits."""
    path.unlink()
    os.mkfifo(path)
    try:
        yield
    finally:
        release(path)


def release(path: Path) -> None:
    """Lets all who wait read an empty file."""
    if path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("engine", engines.EMBEDDED)
async def test_hanging_store_stops_no_other_request(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another prompt, which finds nothing in the store, is read and answered meanwhile; so is one
    that comes after the wait of the first, which is computed then."""
    model = reference("qwen3")
    weights = published(model)
    async with pair_with_store(engine, tmp_path, weights) as pair:
        await pair.sample(PROMPT)
    first = block_files(pair, PROMPT)[0]
    monkeypatch.setattr(WAIT, _LONG_S)
    with hanging(first):
        async with pair_with_store(engine, tmp_path, weights) as pair, asyncio.timeout(_LONG_S):
            waits = asyncio.create_task(pair.sample(PROMPT))
            other = prompt_ids(30, seed=5)
            answer = await pair.sample(other, replace(GREEDY, max_tokens=40))
            assert is_greedy(model, other, answer.ids)
            assert not waits.done()
            release(first)
            found = await waits
    assert found.cached_tokens == 0
    assert is_greedy(model, PROMPT, found.ids)


@pytest.mark.parametrize("engine", engines.EMBEDDED)
async def test_prompt_that_has_waited_for_the_store_is_computed(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the blocks that came in time. While the read hangs, later prompts do without the store;
    afterwards it serves again."""
    model = reference("qwen3")
    weights = published(model)
    further = prompt_ids(70, seed=3)
    async with pair_with_store(engine, tmp_path, weights) as pair:
        await pair.sample(PROMPT)
        await pair.sample(further)
    second = block_files(pair, PROMPT)[1]
    monkeypatch.setattr(WAIT, 1.0)
    with hanging(second):
        async with pair_with_store(engine, tmp_path, weights) as pair, asyncio.timeout(_LONG_S):
            answer = await pair.sample(PROMPT)
            assert answer.cached_tokens == 16
            assert is_greedy(model, PROMPT, answer.ids)
            without = await pair.sample(further[:60])
            assert without.cached_tokens == 0
            release(second)
            reads = pair.prefill._stored_reads  # type: ignore[attr-defined]
            while reads._late:
                await asyncio.sleep(0.01)
            again = await pair.sample(further)
            assert again.cached_tokens == STORED
            assert is_greedy(model, further, again.ids)
