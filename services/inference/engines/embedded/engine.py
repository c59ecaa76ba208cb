"""The embedded engine: its role both, and its start in each role."""

from __future__ import annotations

from forge.runtime.actors.actor import ThreadActor
from services.inference.engines.embedded import family_check
from services.inference.engines.embedded.roles.both import BothActor
from services.inference.engines.embedded.roles.decode_engine import EmbeddedDecode
from services.inference.engines.embedded.roles.prefill_engine import EmbeddedPrefill
from services.inference.engines.embedded.roles.wiring import (
    EngineParts,
    decode_actor,
    prefill_actor,
)

__all__ = ["EmbeddedBoth", "EmbeddedDecode", "EmbeddedPrefill"]


class EmbeddedBoth(EmbeddedPrefill, EmbeddedDecode):
    """Reads prompts and samples, with one model and one prefix cache."""

    role = "both"
    held_share = 1 / 4
    resumes = True

    @classmethod
    def make_actor(cls, parts: EngineParts) -> ThreadActor:
        """Return the actor that reads prompts and samples."""
        kv_bytes = cls.running_bytes(parts.options)
        cache = parts.prefix_cache(resumes=cls.resumes)
        return BothActor(
            prefill_actor(parts, cache, beside_steps=True),
            decode_actor(parts, cache, kv_bytes=kv_bytes, resumes=cls.resumes),
        )


# Makes this module an `EngineProvider`; `check` and `start_both` are its optional parts.
start_prefill = EmbeddedPrefill.start
start_decode = EmbeddedDecode.start
start_both = EmbeddedBoth.start
check = family_check.check
