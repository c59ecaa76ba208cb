"""Training uses the weights that inference serves: published, rounded ones."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from forge.rl.config import LearnerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.served_weights import ServedValues
from forge.rl.numerics import matrices
from tests.support.rl.models import make_sample, tiny_model

SAMPLES = [make_sample([1, 2, 3, n, n + 1], (3, 5), rng=Random(n)) for n in range(4)]


def rounded(model: Any) -> Any:
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one.bfloat16())
    return model


def learner(model: Any, *, autocast: torch.dtype | None, served: bool) -> Learner:
    values = ServedValues(model, published=torch.bfloat16, autocast=autocast) if served else None
    return Learner(TreePolicy(model, autocast=autocast), LearnerConfig(), served=values)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mixtral"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_loss_and_gradient_are_computed_with_the_published_weights(
    family: str, autocast: torch.dtype | None
) -> None:
    """To the bit, with a tied head and without, with autocast and without; the master weights are
    untouched, and an update moves them."""
    model = tiny_model(family, torch.float32)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    own = learner(model, autocast=autocast, served=True)
    plain = learner(rounded(tiny_model(family, torch.float32)), autocast=autocast, served=False)
    plan = own.plan(SAMPLES)
    loss, stats = own.accumulate(plan)
    expected, expected_stats = plain.accumulate(plan)
    assert loss == expected
    assert torch.equal(stats[0].logprobs, expected_stats[0].logprobs)
    gradients = dict(plain.policy.model.named_parameters())
    for name, one in model.named_parameters():
        assert torch.equal(one.detach(), before[name])
        assert one.grad is not None and torch.equal(one.grad, gradients[name].grad), name
    assert own.step(plan, weight_version=0).skipped == ""
    moved = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    assert moved and any("norm" in name for name in moved)


@pytest.mark.parametrize("family", ["llama", "mixtral", "llama4", "falcon_h1"])
def test_every_value_of_a_pass_is_a_published_one(family: str) -> None:
    """Rounded here, or by autocast: also routers that are linear layers (Llama 4), which compute
    in float32."""
    model = TreePolicy(tiny_model(family, torch.float32), autocast=torch.bfloat16).model
    narrow = {id(one) for one in matrices(model)}
    with ServedValues(model, published=torch.bfloat16, autocast=torch.bfloat16).in_place():
        unrounded = [
            name
            for name, one in model.named_parameters()
            if id(one) not in narrow and not torch.equal(one, one.bfloat16().float())
        ]
    assert unrounded == []


def test_master_weights_are_restored_after_a_failed_pass() -> None:
    """A batch that does not fit into memory starts again from them."""
    model = tiny_model("qwen3", torch.float32)
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(MemoryError), ServedValues(model, published=torch.bfloat16).in_place():
        assert all(torch.equal(one, one.bfloat16().float()) for one in model.parameters())
        raise MemoryError
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_master_weights_outlive_a_shortage_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the values are rounded, after the first of them."""
    model = tiny_model("llama", torch.float32)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    values = ServedValues(model, published=torch.bfloat16)
    left = [3]
    to = torch.Tensor.to

    def limited(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return to(tensor, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", limited)
        with pytest.raises(torch.OutOfMemoryError), values.in_place():
            pass
    for name, one in model.named_parameters():
        assert torch.equal(one.detach(), before[name])
