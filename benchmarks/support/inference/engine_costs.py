"""The costs of the embedded engine on this machine, in CPU seconds of one thread.

Fits `EngineCosts` to the real engine in the role both, on a random model of a given shape: prompts
of several lengths, with and without a cached prefix, and steps of several batches and contexts.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks.support.routing.traffic import EngineCosts
from forge.core.token_columns import int32_bytes
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import (
    KvSpan,
    Prompt,
    Sampling,
)
from services.inference.engines.embedded.engine import EmbeddedBoth
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensor_bytes import to_named

_STEPS = 12
SHAPES: dict[str, PreTrainedConfig] = {
    # The starting weights of `forge run`.
    "tiny": Qwen3Config(
        vocab_size=545, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=8192,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    ),
    # 39 million parameters: a token costs as much to read as ten of the tiny model.
    "small": LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=8192,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    ),
}  # fmt: skip


def measure(shape: str, *, quick: bool = False) -> EngineCosts:
    """Return the costs of a model of this shape."""
    return asyncio.run(_measure(SHAPES[shape], quick=quick))


@dataclass(slots=True)
class _Engine:
    """An engine, and requests to it that are alone in the process."""

    engine: EmbeddedBoth
    vocabulary: int
    numbers: int = 0

    async def prefill(self, ids: list[int], *, tokens: int = 1) -> Prompt:
        """Read a prompt for an answer of `tokens`."""
        self.numbers += 1
        sampling = Sampling(
            temperature=1.0, top_p=1.0, top_k=0, max_tokens=tokens, stop_ids=frozenset(), seed=0
        )
        prompt = Prompt(request_id=f"{self.numbers}", ids=int32_bytes(ids), sampling=sampling)
        await self.engine.prefill(prompt, hold_s=600)
        return prompt

    def fresh(self, tokens: int) -> list[int]:
        """Return tokens that nothing has cached."""
        self.numbers += 1
        drawn = np.random.default_rng(self.numbers).integers(0, self.vocabulary, tokens)
        return [int(token) for token in drawn]

    async def decode_s(self, prompts: Sequence[Prompt]) -> float:
        """Return the CPU seconds of one step over these prompts."""

        async def one(prompt: Prompt) -> None:
            async def fetch(from_token: int) -> KvSpan:
                span = await self.engine.fetch_kv(prompt.request_id, from_token=from_token)
                self.engine.release(prompt.request_id)
                return span

            first = (await self.engine.prefill(prompt, hold_s=600)).first
            async for _ in self.engine.decode(prompt, first, fetch, stream=False):
                pass

        began_s = time.process_time()
        await asyncio.gather(*(one(prompt) for prompt in prompts))
        return (time.process_time() - began_s) / _STEPS


async def _measure(config: PreTrainedConfig, *, quick: bool) -> EngineCosts:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = {name: to_named(name, one) for name, one in model.state_dict().items()}
        options = EngineOptions(
            model_path=str(Path(folder)), dtype="float32", request_timeout_s=600.0
        )
        system = ActorSystem("costs")
        try:
            engine = await EmbeddedBoth.start(system, options)
            await engine.load(weights, version=1)
            asked = _Engine(engine, config.vocab_size)
            prefill = await _prefill_costs(asked, quick=quick)
            step = await _step_costs(asked, quick=quick)
        finally:
            await system.stop()
    return EngineCosts(
        pass_s=prefill[0], token_s=prefill[1], context_s=prefill[2],
        step_s=step[0], row_s=step[1], kv_s=step[2],
    )  # fmt: skip


async def _prefill_costs(asked: _Engine, *, quick: bool) -> list[float]:
    rows, seconds = [], []
    await asked.prefill(asked.fresh(64))
    for context in (0, 512) if quick else (0, 512, 2048):
        for tokens in (16, 128, 496):
            before = asked.fresh(context)
            if context:
                await asked.prefill(before)
            ids = before + asked.fresh(tokens)
            began_s = time.process_time()
            await asked.prefill(ids)
            seconds.append(time.process_time() - began_s)
            rows.append([1.0, tokens, tokens * (context + tokens / 2)])
    return _fit(rows, seconds)


async def _step_costs(asked: _Engine, *, quick: bool) -> list[float]:
    rows, seconds = [], []
    for context in (64, 512) if quick else (64, 512, 2048):
        for batch in (1, 4, 8) if quick else (1, 4, 16):
            prompts = [
                await asked.prefill(asked.fresh(context), tokens=_STEPS) for _ in range(batch)
            ]
            # Read once already: what remains is the last block of each.
            empty_s = await asked.decode_s(
                [await asked.prefill(list(_ids(one)), tokens=1) for one in prompts]
            )
            seconds.append(await asked.decode_s(prompts) - empty_s)
            rows.append([1.0, batch, batch * context])
    return _fit(rows, seconds)


def _ids(prompt: Prompt) -> Sequence[int]:
    return [int(token) for token in np.frombuffer(prompt.ids, dtype="<i4")]


def _fit(rows: list[list[float]], seconds: list[float]) -> list[float]:
    """Least squares of relative errors; no part is negative."""
    x, y = np.asarray(rows), np.asarray(seconds)
    kept = list(range(x.shape[1]))
    found = np.zeros(x.shape[1])
    while kept:
        solved, *_ = np.linalg.lstsq(x[:, kept] / y[:, None], np.ones(len(y)), rcond=None)
        if (solved >= 0).all():
            found[kept] = solved
            break
        kept = [column for column, value in zip(kept, solved, strict=True) if value >= 0]
    return [float(value) for value in found]
