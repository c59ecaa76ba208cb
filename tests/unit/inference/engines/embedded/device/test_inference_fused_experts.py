"""Fused layers around mixtures of experts, which stay as they are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from services.inference.engines.embedded.device import prompt_layers
from services.inference.engines.embedded.device.prompt_layers import PromptLayers
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.tensor_bytes import to_named

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 10,
    "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        decoder_sparse_step=1, mlp_only_layers=[1],
    ),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
}  # fmt: skip
"""More layers than torch compiles variants of one function."""


@pytest.fixture(params=CONFIGS)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    """A small mixture of experts with random weights."""
    config = CONFIGS[request.param]
    config.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = Policy.build(str(tmp_path), dtype="float32", device="cpu")
    weights = {name: to_named(name, one) for name, one in model.state_dict().items()}
    policy.swap(policy.stage(weights, version=1))
    return policy


def test_layers_with_experts_are_fused_and_record_the_same(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers share code for passes of any length; log-probs and recorded experts stay."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    counters.clear()
    layers = PromptLayers(policy)
    with capture_logs() as logs:
        layers.after_swap()
    assert [line["event"] for line in logs] == ["fused_prefill_used"]
    compiled = counters["frames"]["ok"]
    assert 0 < compiled <= 16
    for tokens in (2, 8, 48, 61, 300):
        monkeypatch.setattr(prompt_layers, "_CHECK_TOKENS", tokens)
        with torch.inference_mode():
            expected, routes_NX = layers._logprobs(), policy.routes_NX
            with layers.used():
                found = layers._logprobs()
        torch.testing.assert_close(found, expected)
        again_NX = policy.routes_NX
        assert routes_NX is not None and again_NX is not None and again_NX is not routes_NX
        assert torch.equal(again_NX, routes_NX)
    assert counters["frames"]["ok"] == compiled
    assert not counters["recompiles"]
