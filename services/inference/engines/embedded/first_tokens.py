"""The answers to computed prompts: their first tokens, and the tensors that a worker holds."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from forge.core.errors import ForgeError
from services.inference.engines.base import BrokenWeights, Prefilled
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.memory_shortage import attempt, keep_if_room, refusal
from services.inference.engines.embedded.messages import HeldPrompt, Read
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.sampler import Drawn, DrawnToken, draw, tokens_of
from services.inference.engines.embedded.prefill_schedule import Reading
from services.inference.engines.embedded.stored_kv import StoredKv


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """A request whose prompt is computed."""

    reading: Reading
    read: Read
    computed: bool
    """The request pays for the prompt; others have found it cached."""


class FirstTokens:
    """Draws first tokens; caches and stores complete prompts."""

    def __init__(self, policy: Policy, cache: KvCache, stored: StoredKv | None) -> None:
        self._policy = policy
        self._cache = cache
        self._stored = stored

    def of(self, rows: Sequence[Complete]) -> list[tuple[Read, HeldPrompt | ForgeError]]:
        """Return the answer of each request. A draw without memory is repeated in halves."""
        tried = attempt(partial(_drawn, rows), self._policy.device)
        if tried.result is not None:
            drawn = tried.result
            return [
                (one.read, drawn.failed.get(row) or self._answer(one, drawn.row(row)))
                for row, one in enumerate(rows)
            ]
        if len(rows) == 1:
            return [(rows[0].read, _refused(rows[0], tried.shortage))]
        half = len(rows) // 2
        return self.of(rows[:half]) + self.of(rows[half:])

    def cache(
        self, rows: Sequence[Complete], answers: Sequence[tuple[Read, HeldPrompt | ForgeError]]
    ) -> None:
        """Cache and store the prompts that were computed, unless their answer is an error."""
        for one, (_, answer) in zip(rows, answers, strict=True):
            if one.computed and isinstance(answer, HeldPrompt):
                cache = partial(self._cache_prompt, one.reading)
                keep_if_room("prefill", cache, self._policy.device)

    def _answer(self, one: Complete, drawn: DrawnToken) -> HeldPrompt | ForgeError:
        if not math.isfinite(drawn.logprob):
            version = self._policy.version
            return BrokenWeights(f"weights {version} gave a log-prob that is not finite")
        tried = attempt(partial(self._held, one, drawn), self._policy.device)
        return tried.result or _refused(one, tried.shortage)

    def _cache_prompt(self, reading: Reading) -> None:
        self._cache.store(reading.prompt.ids, reading.kv, routes=reading.routes)
        if reading.recurrent is not None:
            self._cache.store_states(reading.prompt.ids, reading.recurrent.kept)
        if self._stored is not None:
            self._stored.write(
                reading.prompt.ids, reading.kv, reading.routes, after_token=reading.start
            )

    def _held(self, one: Complete, drawn: DrawnToken) -> HeldPrompt:
        reading, read, version = one.reading, one.read, self._policy.version
        prefill_s = reading.compute_s + reading.stored_s
        first = tokens_of([(drawn, version)], read.prompt.sampling)
        if (start := read.prompt.sampling.routes_from) is not None:
            rows = reading.routes[start:].numpy().tobytes()
            first = replace(first, routes=self._policy.kv_shape.route_span(rows, start=start))
        return HeldPrompt(
            prefilled=Prefilled(
                first=first,
                cached_tokens=reading.start if one.computed else reading.prompt.tokens,
                queue_s=max(0.0, time.monotonic() - read.asked_s - prefill_s),
                prefill_s=prefill_s,
                stored_tokens=reading.stored if one.computed else 0,
                stored_s=reading.stored_s if one.computed else 0.0,
            ),
            kv=reading.kv,
            routes=reading.routes,
            version=version,
            state=reading.state,
            recurrent=None if reading.recurrent is None else reading.recurrent.now,
        )


def _refused(one: Complete, shortage: str) -> ForgeError:
    prompt = one.read.prompt
    size = f"a prompt of {prompt.tokens} tokens"
    return refusal("prefill", prompt.request_id, size=size, shortage=shortage)


def _drawn(rows: Sequence[Complete]) -> Drawn:
    """Draw the first token of each request."""
    logits = [one.reading.logits for one in rows if one.reading.logits is not None]
    return draw(
        torch.stack(logits),
        [one.read.prompt for one in rows],
        positions=[one.read.prompt.tokens for one in rows],
        matchers=[one.read.matcher for one in rows],
        answers=[()] * len(rows),
    )
