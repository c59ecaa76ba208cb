"""Weights in 16 bits, in passes that compute in a wider type."""

from __future__ import annotations

import torch

from forge.rl.model.narrow_layers import widen_in_wide_passes
from forge.rl.model.policy import TreePolicy
from tests.support.rl.models import tiny_model


def test_head_computes_in_float32_beside_widened_layers() -> None:
    """Ranks that divide a model patch its layers after its head."""
    model = tiny_model("qwen3", torch.float32)
    TreePolicy(model, autocast=torch.bfloat16)
    widen_in_wide_passes(model)
    states_BLC = torch.randn(1, 3, model.config.hidden_size)
    with torch.autocast("cpu", torch.bfloat16):
        logits_BLV = model.lm_head(states_BLC)
    assert torch.equal(logits_BLV, torch.nn.functional.linear(states_BLC, model.lm_head.weight))
