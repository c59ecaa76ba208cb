"""The entry point: starts the engine where vLLM is installed, else says how to install it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from forge.core.errors import ConfigError
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.provider import EngineOptions

if TYPE_CHECKING:
    from services.inference.engines.vllm.engine import VllmEngine
    from services.inference.engines.vllm.roles import VllmDecode, VllmPrefill


_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


async def start_aggregated(actors: ActorSystem, options: EngineOptions) -> VllmEngine:
    """Start vLLM in a process of its own, without weights. Raises ConfigError."""
    _require_vllm()
    from services.inference.engines.vllm.engine import VllmEngine

    return await VllmEngine.start(actors, options)


async def start_prefill(actors: ActorSystem, options: EngineOptions) -> VllmPrefill:
    """Start vLLM for the role prefill. Raises ConfigError."""
    _require_vllm()
    from services.inference.engines.vllm.roles import VllmPrefill

    return await VllmPrefill.start(actors, options, "prefill")


async def start_decode(actors: ActorSystem, options: EngineOptions) -> VllmDecode:
    """Start vLLM for the role decode. Raises ConfigError."""
    _require_vllm()
    from services.inference.engines.vllm.roles import VllmDecode

    return await VllmDecode.start(actors, options, "decode")


def check(
    model_path: str, *, context_tokens: int, device: str = "cpu", dtype: str = "auto"
) -> None:
    """Raises ConfigError without vLLM, for the second model runner, and for a model that vLLM does
    not have, or not on this device."""
    _require_vllm()
    from services.inference.engines.vllm.arguments import check_model

    check_model(model_path, device=device, dtype=dtype)


def _require_vllm() -> None:
    if find_spec("vllm") is None:
        raise ConfigError(
            "engine = 'vllm': this Python has no vllm; run the worker in the environment that "
            "`make engine-vllm` installs (.venv-vllm/bin/python -m services.inference)"
        )
    # The second one has another sampler and takes other logits processors.
    runner = os.environ.get(_RUNNER, "0")
    if runner != "0":
        raise ConfigError(
            f"{_RUNNER} = {runner!r}: the engine vllm samples with vLLM's first model runner; "
            "unset the variable"
        )
