"""Layers in 16 bits: what computes wider, and passes that compute all in a wider type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge.rl.config import LearnerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.compiled import compile_layers
from forge.rl.model.narrow_layers import widen_layers
from forge.rl.model.policy import TreePolicy
from forge.rl.model.recomputation import recompute_activations
from forge.rl.numerics import matrices, wide_modules
from forge.rl.parallel.sharding import layers_of
from tests.support.rl.forests import forest
from tests.support.rl.models import tiny_model


def test_head_computes_in_float32_beside_widened_layers() -> None:
    """Ranks that divide a model patch its layers after its head."""
    model = tiny_model("qwen3", torch.float32)
    TreePolicy(model, autocast=torch.bfloat16)
    widen_layers(model)
    states_BLC = torch.randn(1, 3, model.config.hidden_size)
    with torch.autocast("cpu", torch.bfloat16):
        logits_BLV = model.lm_head(states_BLC)
    assert torch.equal(logits_BLV, torch.nn.functional.linear(states_BLC, model.lm_head.weight))


@pytest.mark.parametrize(
    "family", ["qwen3", "llama", "gemma3", "qwen3_moe", "falcon_h1", "qwen3_next", "mamba"]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_of_16_bits_compute_as_those_that_autocast_rounds(
    family: str, recompute: bool
) -> None:
    """Bit for bit, where their values are the same: norms of queries and keys, scans and
    convolutions compute in float32, and the gradients of matrices are equal, also of layers that
    the backward computes again."""
    found = []
    for gathered in (False, True):
        model = tiny_model(family, torch.float32)
        with torch.no_grad():
            for one in model.parameters():
                if one.ndim == 1:  # a norm of ones rounds nothing
                    one.add_(0.3 * torch.randn(one.shape, generator=torch.manual_seed(3)))
                one.copy_(one.bfloat16())
        if recompute:
            recompute_activations(model)
        policy = TreePolicy(model, autocast=torch.bfloat16)
        routers = wide_modules(model)
        if gathered:
            widen_layers(model)
            for layer in layers_of(model):
                for module in layer.modules():
                    if module not in routers:
                        for one in module.parameters(recurse=False):
                            one.data = one.data.bfloat16()
        (tree,) = Learner(policy, LearnerConfig()).plan(forest("forked")).trees
        logprobs_T, _ = policy.logprobs(tree)
        logprobs_T.sum().backward()
        found.append((logprobs_T.detach(), gradients(model)))
    (expected_T, expected), (found_T, grads) = found
    assert torch.equal(found_T, expected_T)
    assert all(map(torch.equal, grads, expected))


def gradients(model: Any) -> list[torch.Tensor]:
    """Of the matrices: those of vectors, and of biases, are rounded where their values are."""
    trained = [one for one in matrices(model) if one.ndim > 1]
    return [one.grad.float() for one in trained if one.grad is not None]


def test_compiled_layers_of_16_bits_compute_wide_passes() -> None:
    """As ranks gather them for the check before training."""
    model = tiny_model("qwen3", torch.float32)
    policy = TreePolicy(model, autocast=torch.bfloat16)
    for layer in layers_of(model):
        layer.to(torch.bfloat16)
    widen_layers(model)
    compile_layers(model)
    with policy.exact(), policy.attention.stock():
        found = policy.model(torch.tensor([[1, 2, 3]]), use_cache=False).logits
    assert found.dtype == torch.float32 and found.isfinite().all()
