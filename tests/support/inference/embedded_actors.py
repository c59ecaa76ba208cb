"""The actors of the embedded engine on the thread of a test, which runs each of their passes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import PretrainedConfig, PreTrainedModel

from forge.core.errors import ForgeError
from services.inference.engines import tensor_bytes
from services.inference.engines.base import KvSpan, Piece, Prompt
from services.inference.engines.cache_reports.cache_log import CacheLog
from services.inference.engines.embedded.engine import EmbeddedBoth
from services.inference.engines.embedded.messages import (
    Abort,
    HeldPrompt,
    Join,
    Read,
    Reserve,
    Swap,
)
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.roles.wiring import EngineParts, build_policy
from services.inference.engines.provider import EngineOptions
from tests.contract import engines, recurrent_models
from tests.contract.engines import Answer, make_prompt


def _configs() -> dict[str, PretrainedConfig]:
    return {**engines.CONFIGS, "qwen3_moe": engines.ROUTED, **recurrent_models.RECURRENT}


class _AtOnce:
    """Stands in for the event loop: calls at once."""

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)


class BothByHand:
    """An actor of the role both without a thread, with random weights of seed 0 as version 1."""

    def __init__(
        self, folder: Path, family: str = "qwen3", *, drafts: bool = False, **options: Any
    ) -> None:
        """`drafts`: its weights have draft heads. `options`: those of `EngineOptions`."""
        _configs()[family].save_pretrained(folder)
        chosen = EngineOptions(
            model_path=str(folder),
            dtype="float32",
            block_tokens=engines.BLOCK_TOKENS,
            request_timeout_s=600.0,
            **options,
        )
        self.policy: Policy = build_policy(chosen)
        parts = EngineParts(policy=self.policy, options=chosen, store=None, cache_log=CacheLog())
        self.actor = EmbeddedBoth.make_actor(parts)
        self.actor.loop = cast(asyncio.AbstractEventLoop, _AtOnce())
        self.actor.started()
        self.family = family
        self._drafts = drafts
        self.failures: dict[str, ForgeError] = {}
        """The errors of requests."""
        self.held: dict[str, HeldPrompt] = {}
        """The prompts that were read, by request."""
        self.outcomes: list[ForgeError | None] = []
        """Of swaps, in order."""
        self.swap(1)

    def swap(self, version: int, *, seed: int = 0, broken: bool = False) -> None:
        """Sends other weights; broken ones give no numbers."""
        model = self.reference(seed=seed)
        if broken:
            model.model.norm.weight.data.fill_(3e38)
        tensors = engines.published(model)
        if self._drafts:
            tensors = engines.with_heads(tensors)
        staged = self.policy.stage(tensors, version=version)
        self._send(Swap(weights=staged, deliver=self.outcomes.append))

    def reference(self, *, seed: int = 0) -> PreTrainedModel:
        """The model as transformers runs it."""
        if self.family in recurrent_models.RECURRENT:
            return recurrent_models.reference(self.family, seed=seed)
        if self._drafts:
            return engines.draftable(seed=seed)
        return engines.reference(self.family, seed=seed)

    def read(self, *prompts: list[int], most: int = 16) -> list[Prompt]:
        """Lets prompts join; greedy answers of `most` tokens."""
        sampling = replace(engines.GREEDY, max_tokens=most)
        asked = [make_prompt(ids, sampling) for ids in prompts]
        self._send(*(Read(prompt=one, asked_s=0.0, deliver=self._note(one)) for one in asked))
        return asked

    def reserve(self, prompt: Prompt) -> int:
        """Pins the cached part of a prompt; returns its tokens."""
        (cached,) = self._send(Reserve(prompt=prompt))
        if isinstance(cached, ForgeError):
            raise cached
        return int(cached)

    def sample(self, prompt: Prompt, *, cached: int | None = None, sent: bool = False) -> Answer:
        """Joins a prompt that was read; returns the answer, which grows with the steps. `sent`: its
        keys and values come as bytes, as from another worker."""
        start = self.reserve(prompt) if cached is None else cached
        held, answer = self.held[prompt.request_id], Answer()
        kv = held.kv[:, :, :, start:]
        to_bytes = tensor_bytes.to_bytes
        span = KvSpan(
            from_token=start,
            tokens=kv.shape[3],
            version=held.version,
            dtype=tensor_bytes.NAMES[kv.dtype],
            shape=tuple(kv.shape),
            data=to_bytes(kv) if sent else b"",
            kept=None if sent else held,
            recurrent=to_bytes(held.recurrent) if sent and held.recurrent is not None else b"",
            last_state=to_bytes(held.state) if sent and held.state is not None else b"",
        )

        def deliver(piece: Piece | ForgeError) -> None:
            if isinstance(piece, ForgeError):
                self.failures[prompt.request_id] = piece
                return
            answer.add(piece.tokens)
            answer.finish = piece.finish

        answer.add(held.prefilled.first)
        join = Join(
            prompt=prompt,
            first=held.prefilled.first,
            span=span,
            stream=True,
            asked_s=0.0,
            deliver=deliver,
        )
        (refusal,) = self._send(join)
        if refusal is not None:
            raise refusal
        return answer

    def abort(self, prompt: Prompt) -> None:
        """The caller has left."""
        self._send(Abort(request_id=prompt.request_id))

    def work(self) -> bool:
        """Runs a pass and a step."""
        return self.actor.work()

    def _send(self, *messages: Any) -> list[Any]:
        return list(self.actor.receive_batch(messages))

    def _note(self, prompt: Prompt) -> Callable[[HeldPrompt | ForgeError], None]:
        def deliver(outcome: HeldPrompt | ForgeError) -> None:
            if isinstance(outcome, ForgeError):
                self.failures[prompt.request_id] = outcome
                return
            self.held[prompt.request_id] = outcome

        return deliver
