"""The part of a prompt that prefill need not compute: from its prefix cache, from the KV store, and
from a waiting prompt with the same beginning."""

from __future__ import annotations

import time

import torch

from forge.core.placement.prefix_cache import Match
from services.inference.engines.base import Prompt
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.prefill_schedule import Reading, WaitingPrefixes
from services.inference.engines.embedded.recurrent.read_states import ReadStates
from services.inference.engines.embedded.recurrent.shape import StateShape
from services.inference.engines.embedded.stored_kv import StoredKv


class KnownPrefixes:
    """Begins readings; used by the actor that reads prompts."""

    def __init__(
        self, policy: Policy, cache: KvCache, stored: StoredKv | None, *, block_tokens: int
    ) -> None:
        self._policy = policy
        self._cache = cache
        self._stored = stored
        self._block_tokens = block_tokens

    @torch.inference_mode()
    def begin(self, prompt: Prompt, prefixes: WaitingPrefixes) -> Reading:
        """Find a prompt's part in the cache, in the store, and in a waiting prompt."""
        shape = self._policy.kv_shape
        # The last token is always computed: its logits give the first token of the answer.
        limit = prompt.tokens - 1
        match = self._cache.resumable(prompt.ids, limit_tokens=limit)
        reading = Reading(
            prompt=prompt,
            ids=torch.frombuffer(prompt.ids, dtype=torch.int32).long().to(shape.device),
            kv=shape.empty(prompt.tokens),
            routes=shape.unknown_routes(prompt.tokens),
            cached=match.tokens,
        )
        self._cache.read(match, reading.kv)
        self._cache.read_routes(match, reading.routes)
        self._read_stored(reading, limit)
        reading.done = reading.filled = reading.cached
        source, shared = prefixes.longest(prompt, limit_tokens=limit)
        if source is not None and source.recurrent is not None and shared > reading.cached:
            shared = source.recurrent.share(shared, done=source.done)
        if shape.states is not None:
            reading.recurrent = self._begin_states(shape.states, prompt, match, at_least=shared)
        if source is not None and shared > reading.cached:
            reading.source, reading.shared, reading.done = source, shared, shared
        return reading

    def _begin_states(
        self, shape: StateShape, prompt: Prompt, match: Match, *, at_least: int
    ) -> ReadStates:
        """The states with which a prompt resumes, and where it keeps further ones: behind its last
        block, and where it parts from another prompt, if that is behind `at_least` tokens."""
        states = ReadStates(shape, self._policy.device)
        self._cache.read_states(match, states.now)
        limit = prompt.tokens - 1
        start = max(match.tokens, at_least)
        parting = self._cache.match(prompt.ids, limit_tokens=limit).tokens
        for stop in (limit // self._block_tokens * self._block_tokens, parting):
            if stop > start:
                states.stop(stop)
        return states

    def _read_stored(self, reading: Reading, limit_tokens: int) -> None:
        if self._stored is None:
            return
        began_s, cached = time.monotonic(), reading.cached
        reading.cached = self._stored.read(
            reading.prompt.ids,
            reading.kv,
            reading.routes,
            from_token=cached,
            limit_tokens=limit_tokens,
        )
        reading.stored, reading.stored_s = reading.cached - cached, time.monotonic() - began_s
