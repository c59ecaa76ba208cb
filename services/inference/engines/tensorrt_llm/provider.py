"""Target of the entry point: starts the engine for one role, see `EngineProvider`."""

from __future__ import annotations

from functools import cache

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import (
    BothEngine,
    DecodeEngine,
    PrefillEngine,
)
from services.inference.engines.model_limits import read_limits
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.doctor.checks import examine
from services.inference.engines.tensorrt_llm.engine import TensorRtLlm
from services.inference.engines.tensorrt_llm.library.library import (
    Library,
    find_library,
    load_library,
)
from services.inference.engines.tensorrt_llm.weights.checkpoint import read_checkpoint

__all__ = ["check", "examine", "start_both", "start_decode", "start_prefill"]


async def start_prefill(actors: ActorSystem, options: EngineOptions) -> PrefillEngine:
    """See `EngineProvider`."""
    return await TensorRtLlm.start(actors, options, _library(), Role.PREFILL)


async def start_decode(actors: ActorSystem, options: EngineOptions) -> DecodeEngine:
    """See `EngineProvider`."""
    return await TensorRtLlm.start(actors, options, _library(), Role.DECODE)


async def start_both(actors: ActorSystem, options: EngineOptions) -> BothEngine:
    """See `EngineProvider`."""
    return await TensorRtLlm.start(actors, options, _library(), Role.BOTH)


def check(model_path: str, *, context_tokens: int) -> None:
    """Raises `ConfigError` without the library, for another surface, and for a model that cannot be
    read or has no weights."""
    read_limits(model_path, context_tokens=context_tokens)
    read_checkpoint(model_path)
    found = find_library()
    if found.differences:
        load_library(found)


@cache
def _library() -> Library:
    return load_library(find_library())
