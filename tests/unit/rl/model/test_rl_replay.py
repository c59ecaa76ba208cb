"""Replay of recorded experts: exact in every tree, for each family of routers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from forge.core.errors import InvalidArgument
from forge.core.routes import Routes, RouteShape, RouteSpan
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import as_sample, own_logprobs
from forge.rl.model.recomputation import recompute_activations
from forge.rl.routing import RoutePass, find_routing, routed
from tests.support.rl.forests import forest
from tests.support.rl.models import (
    CAP,
    Gradient,
    gradients,
    reference_gradient,
    relative_errors,
    tiny_model,
    wide_norms,
)
from tests.support.rl.routed import routers_by_hand, with_routes

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")


def replaying(
    family: str, *, budget: int = 1 << 30, checkpointed: bool = False, **settings: Any
) -> Learner:
    model = tiny_model(family, torch.float64)
    if checkpointed:
        recompute_activations(model)
    policy = TreePolicy(model)
    policy.replay_routes(partial(own_logprobs, model, as_sample([1, 2, 3, 4])))
    config = LearnerConfig(
        token_budget=budget,
        objective=ObjectiveConfig(ratio_cap=CAP),
        **{"compare_replay_every": 1} | settings,
    )
    return Learner(policy, config)


def shape_of(learner: Learner) -> RouteShape:
    assert learner.policy.replay is not None
    return learner.policy.replay.shape


CASES = [
    *((family, "forked", 12, False) for family in FAMILIES),
    ("qwen3_moe", "compacted", 1 << 30, True),
]


@pytest.mark.parametrize(("family", "kind", "budget", "checkpointed"), CASES)
def test_replayed_gradients_equal_those_of_routers_written_out(
    family: str, kind: str, budget: int, checkpointed: bool
) -> None:
    """Loss and gradients agree to 1e-12 with each sample alone through routers that take the
    recorded experts: merged, relayed and recomputed, where samples disagree, and where a token has
    no record."""
    with wide_norms():
        learner = replaying(family, budget=budget, checkpointed=checkpointed)
        samples = with_routes(forest(kind), shape_of(learner), apart=(0,))
        model = tiny_model(family, torch.float64)
        with routers_by_hand(model, samples):
            expected = reference_gradient(model, samples)
        plan = learner.plan(samples)
        loss, _ = learner.accumulate(plan)
        found = Gradient(loss=loss, of=gradients(learner.policy.model))
        assert max(relative_errors(found, expected)) <= 1e-12
    assert plan.split_nodes >= 1
    assert plan.tree_tokens < plan.sample_tokens


def test_own_routes_change_nothing() -> None:
    """A model that replays its own choice computes what it computes without replay, bit by bit."""
    learner = replaying("qwen3_moe")
    model, shape = learner.policy.model, shape_of(learner)
    samples = []
    for one in forest("forked"):
        passed = RoutePass()
        with torch.no_grad(), learner.policy.attention.stock(), routed(passed):
            own_logprobs(model, one)
        ids = passed.choice().to(torch.uint8).numpy().tobytes()
        column = Routes(ids=ids, layers=shape.layers, top_k=shape.top_k, id_bytes=1)
        span = RouteSpan(start=0, tokens=one.tokens, routes=column)
        samples.append(replace(one, routes=(span,)))
    (tree,) = learner.plan(samples).trees
    with torch.no_grad():
        replayed_T, _ = learner.policy.logprobs(tree)
        free_T, _ = learner.policy.without_replay().logprobs(tree)
    assert torch.equal(replayed_T, free_T)
    assert learner.policy.replay is not None
    stats = learner.policy.replay.stats(learner.policy.world, torch.device("cpu"))
    assert (stats.replayed, stats.changed) == (tree.tokens, 0)


def test_step_counts_replayed_and_changed_tokens() -> None:
    """A step says how many tokens had a record, how many the model would have routed otherwise, and
    both log-prob gaps."""
    learner = replaying("mixtral")
    samples = with_routes(forest("forked"), shape_of(learner))
    plan = learner.plan(samples)
    stats = learner.step(plan, weight_version=0).replay
    # One distinct second token, which has no record.
    assert (stats.tokens, stats.replayed) == (plan.tree_tokens, plan.tree_tokens - 1)
    assert 0 < stats.changed <= stats.replayed
    assert stats.changed_choices <= stats.choices == 2 * stats.replayed
    assert stats.compared == plan.trained_tokens
    assert stats.gap != stats.gap_free
    assert plan.split_nodes == 0


def test_counts_of_a_step_are_over_its_mini_batches() -> None:
    """Of both updates; every second batch compares a tree of its first one."""
    learner = replaying("mixtral", mini_batches=2, compare_replay_every=2)
    samples = with_routes(forest("forked"), shape_of(learner))
    plan = learner.plan(samples)
    assert len(plan.updates) == 2
    found = [learner.step(plan, weight_version=0) for _ in range(4)]
    first = plan.updates[0].trained_tokens
    assert [one.replay.compared for one in found] == [first, 0, first, 0]
    # Each of the two trees has a second token without a record.
    assert {one.replay.tokens for one in found} == {plan.tree_tokens}
    assert {one.replay.replayed for one in found} == {plan.tree_tokens - 2}


def test_tree_without_records_is_routed_by_the_model() -> None:
    """With replay, samples without routes, or with those of another model, are computed as
    without."""
    learner = replaying("qwen3_moe")
    plain = forest("forked")
    other = with_routes(plain, RouteShape(layers=3, top_k=2, experts=4))
    expected = learner.plan(plain)
    found = learner.plan(other)
    assert found.unfit_routes == len(plain) and not expected.unfit_routes
    assert found.tree_tokens == expected.tree_tokens
    with torch.no_grad():
        values = [learner.policy.logprobs(plan.trees[0])[0].sum() for plan in (found, expected)]
    assert float(abs(values[0] - values[1])) < 1e-12


def test_model_without_routers_is_refused() -> None:
    """The error names the model and the reason."""
    model = tiny_model("qwen3", torch.float32)
    with pytest.raises(InvalidArgument, match="Qwen3ForCausalLM has no routers"):
        find_routing(model, partial(own_logprobs, model, as_sample([1, 2, 3])))


def test_experts_beyond_those_of_the_model_are_no_record() -> None:
    """A column with a number that no expert has is left out, also at full width."""
    learner = replaying("qwen3_moe")
    shape = shape_of(learner)
    (sample, *_) = with_routes(forest("linear"), shape)
    column = sample.routes[0].routes
    rows = np.frombuffer(column.ids, np.uint8).copy()
    rows[0] = shape.experts
    wrong = Routes(ids=rows.tobytes(), layers=column.layers, top_k=column.top_k, id_bytes=1)
    span = RouteSpan(start=0, tokens=sample.tokens, routes=wrong)
    plan = learner.plan([replace(sample, routes=(span,))])
    assert plan.unfit_routes == 1
