"""Prefill passes: fused layers, compiled once and used only if they compute the same; lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config

from services.inference.engines.cache_reports.cache_log import CacheLog
from services.inference.engines.embedded.device import prompt_layers
from services.inference.engines.embedded.device.prompt_layers import PromptLayers
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.roles import wiring
from services.inference.engines.embedded.roles.wiring import EngineParts
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensor_bytes import to_named


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    """A small Qwen 3 with random weights."""
    config = Qwen3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = Policy.build(str(tmp_path), dtype="float32", device="cpu")
    weights = {name: to_named(name, one) for name, one in model.state_dict().items()}
    policy.swap(policy.stage(weights, version=1))
    return policy


def checked(policy: Policy) -> tuple[PromptLayers, Any]:
    """Its layers after the first weights, and the one line of the log."""
    layers = PromptLayers(policy)
    with capture_logs() as logs:
        layers.after_swap()
    (line,) = logs
    return layers, line


def test_one_compilation_serves_passes_of_any_length(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt never waits for a compiler: that is part of the first weights."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    counters.clear()
    layers, line = checked(policy)
    assert line["event"] == "fused_prefill_used"
    compiled = counters["frames"]["ok"]
    assert compiled > 0
    for tokens in (2, 8, 48, 61, 300):
        monkeypatch.setattr(prompt_layers, "_CHECK_TOKENS", tokens)
        with torch.inference_mode():
            expected = layers._logprobs()
            with layers.used():
                found = layers._logprobs()
        torch.testing.assert_close(found, expected)
    layers.after_swap()
    assert counters["frames"]["ok"] == compiled


def test_layers_with_other_numbers_are_refused(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read with the model's own layers then."""

    class Wrong:
        def __init__(self, model: Any) -> None:
            self.weight = model.get_decoder().layers[0].input_layernorm.weight

        @contextmanager
        def used(self) -> Iterator[None]:
            self.weight.mul_(2)
            yield
            self.weight.div_(2)

    monkeypatch.setattr(prompt_layers, "FusedLayers", Wrong)
    layers, line = checked(policy)
    assert line["event"] == "fused_prefill_refused"
    assert "its log-probs differ by" in line["reason"]
    with torch.inference_mode():
        expected = layers._logprobs()
        with layers.used():
            assert torch.equal(layers._logprobs(), expected)


def test_compiler_that_fails_is_named_once(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a host without a C compiler."""

    def fails(layer: Any, **_: Any) -> Any:
        def forward(*_: Any, **__: Any) -> Any:
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

        return forward

    monkeypatch.setattr(torch, "compile", fails)
    layers, line = checked(policy)
    assert line["event"] == "fused_prefill_refused"
    assert line["reason"] == "Failed to find C compiler."
    with torch.inference_mode(), layers.used():
        assert layers._logprobs().isfinite().all()


@pytest.mark.parametrize(
    ("device", "beside_steps", "asked", "tokens", "awaited"),
    [
        ("cpu", False, 0, 512, 512),
        ("cpu", True, 0, 512, 512),
        ("cuda", False, 0, 16_384, 16_384),
        ("cuda", True, 0, 16_384, 4096),
        ("cuda", False, 100, 100, 100),
        ("cuda", True, 100, 100, 100),
    ],
)
def test_passes_are_shorter_where_steps_wait_for_them(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, device: str, beside_steps: bool, asked: int,
    tokens: int, awaited: int,
) -> None:  # fmt: skip
    """On a GPU a role that also samples has passes of 4,096 tokens while requests wait for their
    end; a setting is taken as it is."""
    policy.device = torch.device(device)
    options = EngineOptions(model_path="", request_timeout_s=1.0, pass_tokens=asked)
    parts = EngineParts(policy=policy, options=options, store=None, cache_log=CacheLog())
    cache = parts.prefix_cache(resumes=False)
    actor = wiring.prefill_actor(parts, cache, beside_steps=beside_steps)
    assert (actor._limit.tokens, actor.beside_tokens) == (tokens, awaited)
    assert (actor._layers is not None) == (device == "cuda")
