"""The programs that `benchmarks.device_inference` compares, in one process, and their models."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    FalconH1Config,
    GenerationConfig,
    Mamba2Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from forge.core.token_columns import int32_bytes
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.process.allocator import settle
from services.inference.engines.base import KvSpan, Prompt, Sampling
from services.inference.engines.embedded.device.forward_pass import DevicePass
from services.inference.engines.embedded.device.prompt_layers import PromptLayers
from services.inference.engines.embedded.engine import EmbeddedBoth
from services.inference.engines.provider import EngineOptions

_SMALL = {"max_position_embeddings": 4096, "eos_token_id": None, "bos_token_id": None}
SHAPES: dict[str, PreTrainedConfig] = {
    "0.6b": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        **_SMALL,
    ),
    "1.7b": Qwen3Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        **_SMALL,
    ),
    # The layers of Qwen3-30B-A3B, 8 of its 48.
    "moe": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        **_SMALL,
    ),
    "mamba2": Mamba2Config(
        vocab_size=50288, hidden_size=768, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        num_hidden_layers=24, chunk_size=256, tie_word_embeddings=True, eos_token_id=None,
        bos_token_id=None,
    ),
    "falcon_h1": FalconH1Config(
        vocab_size=32784, hidden_size=1024, intermediate_size=2048, num_hidden_layers=36,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536,
        mamba_n_heads=24, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=128,
        mamba_chunk_size=128, tie_word_embeddings=False, **_SMALL,
    ),
    "tiny": Qwen3Config(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        **_SMALL,
    ),
    "tiny_moe": Qwen3MoeConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, **_SMALL,
    ),
}  # fmt: skip
Generate = Callable[[list[list[int]], int], Awaitable[None]]
"""Prompts, and the tokens of each answer."""


class Engine:
    """The embedded engine in the role both, called as a worker calls it."""

    def __init__(self, served: EmbeddedBoth, device_pass: DevicePass | None) -> None:
        self.served = served
        self._pass = device_pass
        self._unfused: dict[Any, Any] = {}
        self._numbers = itertools.count()
        self.temperature = 1.0

    @classmethod
    async def start(cls, system: ActorSystem, folder: Path, **options: Any) -> Engine:
        """Start it without weights."""
        made: list[DevicePass] = []

        class Recorded(DevicePass):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                made.append(self)

        with patch("services.inference.engines.embedded.roles.wiring.DevicePass", Recorded):
            chosen = EngineOptions(
                model_path=str(folder), request_timeout_s=3600.0, max_running=512, **options
            )
            served = await EmbeddedBoth.start(system, chosen)
        settle()
        return cls(served, made[0] if made else None)

    def programs(self) -> dict[str, Generate]:
        """The ways to sample, by name: one alone without graphs."""
        if self._pass is None:
            return {"engine": self.graphs}
        return {"graphs": self.graphs, "unfused": self.unfused, "eager": self.eager}

    async def graphs(self, prompts: list[list[int]], tokens: int) -> None:
        """Sample as a worker does, with graphs if there are any."""
        await asyncio.gather(*(self._one(ids, tokens) for ids in prompts))

    async def unfused(self, prompts: list[list[int]], tokens: int) -> None:
        """Sample with graphs of plain layers."""
        assert self._pass is not None
        with (
            patch.object(self._pass, "_fused", new=None),
            patch.object(self._pass, "_graphs", new=self._unfused),
            patch.object(PromptLayers, "used", new=_plain),
        ):
            await self.graphs(prompts, tokens)

    async def eager(self, prompts: list[list[int]], tokens: int) -> None:
        """Sample without."""
        assert self._pass is not None
        with (
            patch.object(self._pass, "_uses_graphs", new=False),
            patch.object(PromptLayers, "used", new=_plain),
        ):
            await self.graphs(prompts, tokens)

    async def _one(self, ids: list[int], tokens: int) -> None:
        number = next(self._numbers)
        sampling = Sampling(
            temperature=self.temperature, top_p=1.0, top_k=0, max_tokens=tokens,
            stop_ids=frozenset(), seed=number,
        )  # fmt: skip
        prompt = Prompt(request_id=str(number), ids=int32_bytes(ids), sampling=sampling)
        read = await self.served.prefill(prompt, hold_s=3600)

        async def fetch(from_token: int) -> KvSpan:
            span = await self.served.local_kv(prompt.request_id, from_token=from_token)
            self.served.release(prompt.request_id)
            return span

        if tokens == 1:
            self.served.release(prompt.request_id)
            return
        sampled = 1
        async for piece in self.served.decode(prompt, read.first, fetch, stream=False):
            sampled += len(piece.tokens.ids)
        assert sampled == tokens


def _plain(layers: PromptLayers) -> AbstractContextManager[None]:
    """In place of `PromptLayers.used`: the model's own layers."""
    return nullcontext()


def generate(model: Any) -> Generate:
    """One call for all prompts."""

    async def run(prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts, device=model.device)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=_settings(tokens)
            )

    return run


def generate_batch(model: Any) -> Generate:
    """Continuous batching."""

    async def run(prompts: list[list[int]], tokens: int) -> None:
        found = model.generate_batch(
            inputs=prompts, generation_config=_settings(tokens), progress_bar=False
        )
        assert len(found) == len(prompts)

    return run


def _settings(tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
