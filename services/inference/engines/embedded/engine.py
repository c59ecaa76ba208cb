"""The embedded engine: its role both, and its start in each role."""

from __future__ import annotations

import asyncio

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import EngineStatus
from services.inference.engines.cache_log import CacheLog
from services.inference.engines.embedded import family_check
from services.inference.engines.embedded.both import BothActor
from services.inference.engines.embedded.decode_engine import EmbeddedDecode
from services.inference.engines.embedded.prefill_engine import EmbeddedPrefill
from services.inference.engines.embedded.role_engine import NEVER_RESTART
from services.inference.engines.embedded.wiring import (
    build_policy,
    decode_actor,
    kv_store,
    prefill_actor,
    prefix_cache,
)
from services.inference.engines.provider import EngineOptions

__all__ = ["EmbeddedBoth", "EmbeddedDecode", "EmbeddedPrefill"]


class EmbeddedBoth(EmbeddedPrefill, EmbeddedDecode):
    """Reads prompts and samples, with one model and one prefix cache."""

    held_share = 1 / 4

    @classmethod
    async def start(cls, actors: ActorSystem, options: EngineOptions) -> EmbeddedBoth:
        """Build the model and start the actor."""
        policy = await asyncio.to_thread(build_policy, options)
        store, log = kv_store(options, policy), CacheLog()
        running_bytes = options.kv_bytes - int(options.kv_bytes * cls.held_share)

        def actor() -> BothActor:
            cache = prefix_cache(options, policy, log)
            return BothActor(
                prefill_actor(options, policy, cache, store),
                decode_actor(options, policy, cache, store, kv_bytes=running_bytes),
            )

        ref = await actors.spawn(actor, name="both", restart=NEVER_RESTART)
        return cls(policy, ref, options, store, log)

    def status(self) -> EngineStatus:
        """Count held prompts and requests beyond `capacity` as queued."""
        running = min(self._work.count - len(self._held), self.capacity)
        return EngineStatus(
            version=self._policy.version, running=running, queued=self._work.count - running
        )


# Makes this module an `EngineProvider`; `check` and `start_both` are its optional parts.
start_prefill = EmbeddedPrefill.start
start_decode = EmbeddedDecode.start
start_both = EmbeddedBoth.start
check = family_check.check
