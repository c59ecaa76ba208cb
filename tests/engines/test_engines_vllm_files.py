"""vLLM's own ExampleConnector between a prefill and a decode process, and why Forge has another.

It keeps keys and values in files. Runs in the environment of `make engine-vllm` alone: `make
test-engines`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from forge.core.errors import Unavailable
from tests.contract import engines
from tests.contract.engines import (
    CACHED_BLOCK_TOKENS,
    GREEDY,
    SAMPLED,
    Answer,
    is_greedy,
    make_prompt,
    prompt_ids,
    published,
    reference,
)

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
ERROR = 1e-4
"""Of a log-prob in float32."""


class Files:
    """Two engines of the adapter, each with a process of vLLM, and their files."""

    def __init__(self, store: Path, found: dict[str, Any]) -> None:
        self.store = store
        self._engines = found

    async def load(self, *, version: int) -> Any:
        """Both serve new weights; returns the model."""
        model = reference("qwen3", seed=version)
        for engine in self._engines.values():
            await engine.load(published(model), version=version)
        return model

    async def read(self, ids: list[int]) -> None:
        """Prefill computes a prompt."""
        await self._answer("prefill", ids, replace(GREEDY, max_tokens=1))

    async def sample(self, ids: list[int], sampling: Any) -> Answer:
        """Decode answers."""
        return await self._answer("decode", ids, sampling)

    async def _answer(self, role: str, ids: list[int], sampling: Any) -> Answer:
        answer = Answer()
        async with aclosing(self._engines[role].generate(make_prompt(ids, sampling))) as pieces:
            async for piece in pieces:
                answer.add(piece.tokens)
                answer.cached_tokens += piece.cached_tokens
        return answer


@pytest_asyncio.fixture
async def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Files]:
    """With vLLM's connector in the place of Forge's own."""
    vllm: Any = import_module("tests.contract.vllm_engine")
    arguments: Any = import_module("services.inference.engines.vllm.arguments")
    store = tmp_path / "files"
    store.mkdir()
    chosen = arguments.transfer_config

    def by_files(kind: str, *, role: str) -> dict[str, Any]:
        place = {"kv_connector_extra_config": {"shared_storage_path": str(store)}}
        own = {k: v for k, v in chosen(kind, role=role).items() if k != "kv_connector_module_path"}
        return own | {"kv_connector": "ExampleConnector"} | place

    monkeypatch.setattr(arguments, "transfer_config", by_files)
    roles = ("prefill", "decode")
    starts = [partial(vllm.VllmEngine.start, role=role) for role in roles]
    async with vllm.started(tmp_path / "model", engines.CONFIGS["qwen3"], *starts) as found:
        yield Files(store, dict(zip(roles, found, strict=True)))


async def test_files_hand_over_and_know_no_weights(files: Files) -> None:
    """Decode loads the blocks of prefill's file, and its answer is the model's. After an update it
    loads that file again, so tokens of version 2 come from keys and values of version 1. Without
    the file, vLLM's process ends."""
    ids = prompt_ids(100)
    blocks = (len(ids) - 1) // CACHED_BLOCK_TOKENS * CACHED_BLOCK_TOKENS
    old = await files.load(version=1)
    await files.read(ids)
    greedy = await files.sample(ids, GREEDY)
    assert is_greedy(old, ids, greedy.ids)
    drawn = await files.sample(ids, SAMPLED)
    assert torch.allclose(torch.tensor(drawn.logprobs), logprobs(old, ids, drawn.ids), atol=ERROR)
    assert greedy.cached_tokens == blocks

    new = await files.load(version=2)
    stale = await files.sample(ids, SAMPLED)
    assert (stale.cached_tokens, set(stale.versions)) == (blocks, {2})
    gap = torch.tensor(stale.logprobs) - logprobs(new, ids, stale.ids)
    assert gap.abs().max() > 0.1

    other = prompt_ids(70, seed=1)
    await files.read(other)
    newest = max(files.store.rglob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    newest.unlink()
    with pytest.raises(Unavailable, match=f"FileNotFoundError: .*{newest.name}"):
        await files.sample(other, GREEDY)


def logprobs(model: Any, ids: list[int], sampled: list[int]) -> torch.Tensor:
    """Those of the model for the tokens behind a prompt; [T]."""
    logits = model(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1)
    return found.gather(-1, torch.tensor(sampled)[:, None])[:, 0]
