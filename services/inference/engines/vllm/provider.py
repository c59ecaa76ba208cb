"""The entry point: starts the engine where vLLM is installed, else says how to install it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from forge.core.errors import ConfigError
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.provider import EngineOptions

if TYPE_CHECKING:
    from services.inference.engines.vllm.engine import VllmEngine


async def start_aggregated(actors: ActorSystem, options: EngineOptions) -> VllmEngine:
    """Start vLLM in a process of its own, without weights. Raises ConfigError."""
    _require_vllm()
    from services.inference.engines.vllm.engine import VllmEngine

    return await VllmEngine.start(actors, options)


def check(model_path: str, *, context_tokens: int) -> None:
    """Raises ConfigError without vLLM, and for a model that it does not have."""
    _require_vllm()
    from services.inference.engines.vllm.arguments import check_model

    check_model(model_path)


def _require_vllm() -> None:
    if find_spec("vllm") is None:
        raise ConfigError(
            "engine = 'vllm': this Python has no vllm; run the worker in the environment that "
            "`make engine-vllm` installs (.venv-vllm/bin/python -m services.inference)"
        )
