"""The entry point: starts the engine where vLLM is installed, else says how to install it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm.doctor import examine, require_vllm

if TYPE_CHECKING:
    from services.inference.engines.vllm.engine import VllmEngine
    from services.inference.engines.vllm.roles import VllmDecode, VllmPrefill

__all__ = ["check", "examine", "start_aggregated", "start_decode", "start_prefill"]


async def start_aggregated(actors: ActorSystem, options: EngineOptions) -> VllmEngine:
    """Start vLLM in a process of its own, without weights. Raises ConfigError."""
    require_vllm()
    from services.inference.engines.vllm.engine import VllmEngine

    return await VllmEngine.start(actors, options)


async def start_prefill(actors: ActorSystem, options: EngineOptions) -> VllmPrefill:
    """Start vLLM for the role prefill. Raises ConfigError."""
    require_vllm()
    from services.inference.engines.vllm.roles import VllmPrefill

    return await VllmPrefill.start(actors, options, "prefill")


async def start_decode(actors: ActorSystem, options: EngineOptions) -> VllmDecode:
    """Start vLLM for the role decode. Raises ConfigError."""
    require_vllm()
    from services.inference.engines.vllm.roles import VllmDecode

    return await VllmDecode.start(actors, options, "decode")


def check(
    model_path: str, *, context_tokens: int, device: str = "cpu", dtype: str = "auto"
) -> None:
    """Raises ConfigError without vLLM, for the second model runner, and for a model that vLLM does
    not have, or not on this device."""
    require_vllm()
    from services.inference.engines.vllm.models import check_model

    check_model(model_path, device=device, dtype=dtype)
