"""The part of a prompt that prefill need not compute: from its prefix cache, from the KV store, and
from a waiting prompt with the same beginning."""

from __future__ import annotations

import torch

from forge.core.placement.prefix_cache import Match
from services.inference.engines.base import Prompt
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.messages import Read
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.prefill_schedule import Reading, WaitingPrefixes
from services.inference.engines.embedded.recurrent.read_states import ReadStates
from services.inference.engines.embedded.recurrent.shape import StateShape
from services.inference.engines.embedded.stored_kv import StoredKv, StoredPrefix


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
    def begin(self, read: Read, prefixes: WaitingPrefixes) -> Reading:
        """Find a prompt's part in the cache, in the store, and in a waiting prompt."""
        shape, prompt = self._policy.kv_shape, read.prompt
        # The last token is always computed: its logits give the first token of the answer.
        limit = prompt.tokens - 1
        match = self._cache.resumable(prompt.ids, limit_tokens=limit)
        stored = self._behind(match, read.stored)
        kv, routes = (None, None) if stored is None else (stored.kv, stored.routes)
        reading = Reading(
            prompt=prompt,
            ids=torch.frombuffer(prompt.ids, dtype=torch.int32).long().to(shape.device),
            kv=shape.empty(prompt.tokens) if kv is None else kv,
            routes=shape.unknown_routes(prompt.tokens) if routes is None else routes,
            cached=match.tokens if stored is None else stored.end,
            stored=0 if stored is None else stored.end - match.tokens,
            stored_s=0.0 if read.stored is None else read.stored.seconds,
        )
        self._cache.read(match, reading.kv)
        self._cache.read_routes(match, reading.routes)
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

    def _behind(self, match: Match, found: StoredPrefix | None) -> StoredPrefix | None:
        """Blocks that these weights computed and that continue the match, else None: weights and
        cache may have changed since the blocks were read."""
        if found is None or self._stored is None:
            return None
        if found.identity != self._stored.store.identity:
            return None
        return found if found.start <= match.tokens < found.end else None
