"""What the engine vllm refuses before it imports vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.core.errors import ConfigError
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm import provider


async def test_second_model_runner_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers would have no shares and resume no grammar: start and --check name the variable."""
    monkeypatch.setattr(provider, "find_spec", lambda name: object())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError, match=r"VLLM_USE_V2_MODEL_RUNNER = '1'.*unset"):
        provider.check(str(tmp_path), context_tokens=64)
    options = EngineOptions(model_path=str(tmp_path), request_timeout_s=1.0)
    for start in (provider.start_aggregated, provider.start_prefill, provider.start_decode):
        with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER"):
            await start(ActorSystem("refusals"), options)
