"""Memory that does not suffice: the batch is cut smaller, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from forge.core.prefix_tree import Sample
from forge.rl.config import LearnerConfig, OptimizerConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from tests.support.rl.models import make_sample, tiny_model
from tests.support.rl.short_memory import NO_MACHINE_HAS, memory_for


def learner(budget: int, **settings: Any) -> Learner:
    optimizer = OptimizerConfig(learning_rate=1e-2)
    config = LearnerConfig(optimizer=optimizer, token_budget=budget, token_budget_floor=8)
    return Learner(TreePolicy(tiny_model("qwen3", torch.float32)), replace(config, **settings))


def samples() -> list[Sample]:
    """Eight sequences of six tokens that share only the first one."""
    rng = Random(3)
    return [make_sample([1, n, n + 1, 5, 6, 7], (2, 6), rng=rng) for n in range(2, 10)]


def weights(one: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.policy.model.state_dict().items()}


@pytest.mark.parametrize("backward", [False, True])
def test_batch_beyond_memory_is_cut_smaller_and_trained_exactly(backward: bool) -> None:
    """Bit for bit the step of a smaller budget, for any gradients of the failed attempt."""
    short = learner(32)
    with memory_for(short, 11, backward=backward) as sizes:
        result = short.step(short.plan(samples()), weight_version=1)
    assert max(sizes) > 11 and result.memory_retries > 0 and result.skipped == ""
    assert "allocate memory" in result.shortage
    small = learner(short.budget.tokens)
    expected = small.step(small.plan(samples()), weight_version=1)
    assert [tree.tokens for tree in result.plan.trees] == [t.tokens for t in expected.plan.trees]
    assert result.loss == expected.loss
    mine, other = weights(short), weights(small)
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_lowered_budget_stays() -> None:
    """The next batch, planned with the old budget, does not fail first."""
    one = learner(32)
    plan = one.plan(samples())
    with memory_for(one, 16) as sizes:
        one.step(plan, weight_version=1)
        sizes.clear()
        again = one.step(plan, weight_version=2)
    assert again.memory_retries == 0 and max(sizes) <= 16
    assert again.plan.token_budget == one.budget.tokens <= 16


def test_batch_that_never_fits_is_skipped_with_the_reason() -> None:
    """Weights stay; the budget too, since a smaller one would not help."""
    one = learner(32)
    before = weights(one)
    with memory_for(one, 3):
        result = one.step(one.plan(samples()), weight_version=1)
    assert "out of memory in a tree of 6 tokens, which no token_budget down to 8 cuts" in (
        result.skipped
    )
    assert all(torch.equal(weights(one)[name], before[name]) for name in before)
    assert (one.steps, one.budget.tokens) == (0, 32)
    assert one.step(one.plan(samples()), weight_version=1).skipped == ""


def test_out_of_memory_in_a_later_pass_skips_the_rest() -> None:
    """The first update stays; the next batch is cut smaller."""
    one = learner(32, passes_per_batch=3)
    with memory_for(one, 100) as sizes, pytest.MonkeyPatch.context() as patch:
        update = one._update

        def then_short(loss: float) -> tuple[float, str]:
            patch.setattr(torch.Tensor, "backward", lambda _: torch.empty(NO_MACHINE_HAS))
            return update(loss)

        patch.setattr(one, "_update", then_short)
        result = one.step(one.plan(samples()), weight_version=1)
    assert result.skipped == "" and "out of memory" in result.cut_short
    assert one.steps == 1 and one.budget.tokens < max(sizes) <= 32


def test_other_errors_are_not_taken_for_out_of_memory() -> None:
    """They reach the supervisor."""
    one = learner(32)
    with pytest.MonkeyPatch.context() as patch:

        def broken(_: Any, **__: Any) -> Any:
            raise RuntimeError("shapes do not match")

        patch.setattr(one.policy, "logprobs", broken)
        with pytest.raises(RuntimeError, match="shapes"):
            one.step(one.plan(samples()), weight_version=1)


def test_tree_of_one_part_is_held_once() -> None:
    """Its pass uses the layout's tensors, not a copy."""
    (tree,) = learner(1000).plan(samples()).trees
    (part,) = tree.parts
    for name in ("places_R", "temperatures_R", "rows_E", "targets_E"):
        own, whole = getattr(part.head, name), getattr(tree.layout.head, name)
        assert own.data_ptr() == whole.data_ptr() and len(own) == len(whole)
