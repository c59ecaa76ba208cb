"""Keys and values in a directory: what another engine finds there, and what it refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.core.named_tensor import NamedTensor
from forge.core.token_columns import int32_bytes
from services.inference.engines.kv_store.metrics import BLOCKS
from services.inference.engines.provider import KvStoreOptions
from tests.contract import engines
from tests.contract.engines import Pair, is_greedy, prompt_ids, published, reference

pytestmark = pytest.mark.matrix

STORE_BLOCK = 16
PROMPT = prompt_ids(70)
STORED = 64
"""Tokens of the whole blocks of the prompt."""


@asynccontextmanager
async def pair_with_store(
    engine: str, folder: Path, weights: dict[str, NamedTensor], *, version: int = 1
) -> AsyncIterator[Pair]:
    """A fresh pair over the folder's store; at its end all blocks are written."""
    model = folder / "model"
    engines.CONFIGS["qwen3"].save_pretrained(model)
    store = KvStoreOptions(
        directory=str(folder / "kv"), max_bytes=64 << 20, block_tokens=STORE_BLOCK
    )
    async with engines.EMBEDDED[engine](model, kv_store=store) as pair:
        await pair.load(weights, version=version)
        yield pair
        await pair.prefill.close()
        if not pair.is_one:
            await pair.decode.close()


def outcomes(name: str) -> float:
    value: float = BLOCKS.labels(name)._value.get()
    return value


def blocks(folder: Path) -> list[Path]:
    return [path for path in (folder / "kv").rglob("*") if path.is_file() and path.name[0] != "."]


def block_files(pair: Pair, ids: list[int]) -> list[Path]:
    """The files of a prompt's blocks, in order: two may have one time."""
    store: Any = pair.prefill._store  # type: ignore[attr-defined]
    chains = store._chains(store.identity, int32_bytes(ids), len(ids))
    return [store._directory._path(store.identity, chain) for chain in chains]


@pytest.mark.parametrize("engine", engines.EMBEDDED)
async def test_restarted_engine_reads_what_another_computed(engine: str, tmp_path: Path) -> None:
    """The prompt, and with the next turn the answer that decode computed; nothing else changes."""
    model = reference("qwen3")
    weights = published(model)
    async with pair_with_store(engine, tmp_path, weights) as pair:
        first = await pair.sample(PROMPT)
        assert first.cached_tokens == 0
    async with pair_with_store(engine, tmp_path, weights, version=7) as pair:
        again = await pair.sample(PROMPT)
        turn = PROMPT + first.ids + prompt_ids(9, seed=1)
        follow_up = await pair.sample(turn)
    assert again.cached_tokens == STORED
    assert again.ids == first.ids
    assert torch.allclose(torch.tensor(again.logprobs), torch.tensor(first.logprobs), atol=1e-5)
    assert set(again.versions) == {7}
    # 70 of the prompt and 15 of the answer are known: the last sampled token was never read.
    assert follow_up.cached_tokens == (70 + 15) // STORE_BLOCK * STORE_BLOCK
    assert is_greedy(model, turn, follow_up.ids)


@pytest.mark.parametrize("engine", engines.EMBEDDED)
async def test_other_weights_meet_no_block_of_these(engine: str, tmp_path: Path) -> None:
    """Whatever their version is: an identity is of the weights, not of their number."""
    async with pair_with_store(engine, tmp_path, published(reference("qwen3"))) as pair:
        await pair.sample(PROMPT)
    other = reference("qwen3", seed=1)
    async with pair_with_store(engine, tmp_path, published(other)) as pair:
        answer = await pair.sample(PROMPT)
        assert answer.cached_tokens == 0
        assert is_greedy(other, PROMPT, answer.ids)
        await pair.load(published(reference("qwen3")), version=2)
        assert (await pair.sample(PROMPT)).cached_tokens == STORED


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def swap_for_another(path: Path) -> None:
    other = next(each for each in blocks(path.parents[3]) if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize(
    ("damage", "defect"),
    [(cut, "truncated"), (flip, "corrupt"), (swap_for_another, "foreign")],
)
async def test_bad_block_is_refused_and_computed(
    damage: Callable[[Path], None], defect: str, tmp_path: Path
) -> None:
    """A damaged file, or the file of another prefix, is counted, removed and written again."""
    model = reference("qwen3")
    async with pair_with_store("embedded", tmp_path, published(model)) as pair:
        await pair.sample(PROMPT)
    damage(block_files(pair, PROMPT)[0])
    before = outcomes(defect)
    async with pair_with_store("embedded", tmp_path, published(model)) as pair:
        answer = await pair.sample(PROMPT)
    assert outcomes(defect) == before + 1
    assert answer.cached_tokens == 0
    assert is_greedy(model, PROMPT, answer.ids)
    async with pair_with_store("embedded", tmp_path, published(model)) as pair:
        assert (await pair.sample(PROMPT)).cached_tokens == STORED
