"""Several updates per batch: the division, the old log-probs, and a resume between batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes
from forge.rl.config import LearnerConfig, MtpConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.learner.learner import Learner
from forge.rl.learner.mini_batches import mini_batches
from forge.rl.model.policy import TreePolicy
from forge.rl.optimizers import Optimizers
from tests.support.rl.models import make_sample, tiny_model
from tests.support.rl.per_sample import columns_of
from tests.support.rl.short_memory import NO_MACHINE_HAS, memory_for

GROUPS = 5


def samples() -> list[Sample]:
    """Five groups of three answers each, which share their prompt; two domains."""
    rng = Random(2)
    made = []
    for group in range(GROUPS):
        prompt = [group, 3, 5, 7]
        for member in range(3):
            ids = [*prompt, *(rng.randrange(13) for _ in range(1 + group))]
            one = make_sample(ids, (4, len(ids)), rng=rng)
            made.append(
                replace(
                    one,
                    group=group,
                    trajectory=3 * group + member,
                    domain="ab"[group % 2],
                    returns=float32_bytes([rng.uniform(-1, 1)] * one.trained_tokens),
                )
            )
    return made


def learner(count: int = 1, *, passes_per_batch: int = 1, **objective: Any) -> Learner:
    config = LearnerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2),
        passes_per_batch=passes_per_batch,
        mini_batches=count,
        objective=ObjectiveConfig(**objective),
    )
    return Learner(TreePolicy(tiny_model("qwen3", torch.float32)), config)


def same_weights(one: Learner, other: Learner) -> bool:
    mine, theirs = one.policy.model.state_dict(), other.policy.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def groups_of(parts: Sequence[Sequence[Sample]]) -> list[list[int]]:
    return [sorted({one.group for one in part}) for part in parts]


def test_groups_stay_whole_and_parts_have_equal_tokens() -> None:
    """Tokens of the groups: 3, 6, 9, 12, 15; domain a has 3, 9, 15, b has 6, 12."""
    parts = mini_batches(samples(), 2)
    assert groups_of(parts) == [[1, 4], [0, 2, 3]]
    assert sum(map(len, parts)) == len(samples())
    assert groups_of(mini_batches(samples(), 9)) == [[4], [2], [0], [3], [1]]
    assert groups_of(mini_batches(list(samples()), 2)) == groups_of(parts)
    assert len(mini_batches([replace(one, group=-1) for one in samples()], 99)) == 3 * GROUPS


def test_mini_batches_are_updates_on_parts_of_the_batch() -> None:
    """Bit for bit the weights of a learner that gets each part as a batch."""
    one, other = learner(3), learner()
    result = one.step(one.plan(samples()), weight_version=1)
    parts = [other.step(other.plan(part), weight_version=1) for part in mini_batches(samples(), 3)]
    assert same_weights(one, other)
    assert (result.updates, one.steps, result.skipped, result.cut_short) == (3, 3, "", "")
    assert result.loss == pytest.approx(sum(each.loss for each in parts) / 3)
    assert result.plan.trained_tokens == sum(each.plan.trained_tokens for each in parts)


def test_statistics_of_draft_heads_are_over_all_mini_batches() -> None:
    """Weighted by tokens: with a learning rate of 0 those of one update on the whole batch."""
    found = []
    for count in (1, 3):
        config = LearnerConfig(
            optimizer=OptimizerConfig(learning_rate=0.0),
            mini_batches=count,
            mtp=MtpConfig(heads=2, learning_rate=0.0),
        )
        torch.manual_seed(3)
        one = Learner(TreePolicy(tiny_model("qwen3", torch.float32)), config)
        found.append(one.step(one.plan(samples()), weight_version=1).mtp)
    assert found[1].drafts == found[0].drafts == (45.0, 45.0)
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-5)
    assert found[1].acceptance == pytest.approx(found[0].acceptance, rel=1e-5)


def test_each_pass_goes_over_all_mini_batches() -> None:
    """In the same order."""
    one, other = learner(2, passes_per_batch=2), learner()
    result = one.step(one.plan(samples()), weight_version=1)
    for part in [*mini_batches(samples(), 2)] * 2:
        other.step(other.plan(part), weight_version=1)
    assert same_weights(one, other) and result.updates == 4


def test_recomputed_log_probs_are_those_before_the_first_update() -> None:
    """Also for the later mini-batches; as if the engine had reported those of the trainer."""
    recomputed = learner(3, algorithm="ppo_clip", old_logprobs="recomputed")
    recomputed.step(recomputed.plan(samples()), weight_version=1)
    reported = learner(3, algorithm="ppo_clip")
    model = tiny_model("qwen3", torch.float32)
    with torch.no_grad():
        batch = [
            replace(
                one,
                behavior_logprobs=array("f", columns_of(model, [one]).logprobs.tolist()).tobytes(),
            )
            for one in samples()
        ]
    result = reported.step(reported.plan(batch), weight_version=1)
    mine, theirs = (one.policy.model.state_dict() for one in (recomputed, reported))
    assert all(torch.allclose(mine[name], theirs[name], atol=2e-4) for name in mine)
    assert result.stats.logprob_gap_mean > 0.01  # the later ones have moved


def test_critic_values_are_those_before_the_first_update() -> None:
    """Their statistics are equal for one update and for three."""
    losses = []
    for count in (1, 3):
        one = learner(count, algorithm="ppo")
        assert one._critic is not None
        with torch.no_grad():
            one._critic.head.weight.copy_(torch.linspace(-0.3, 0.3, 16))
        losses.append(one.step(one.plan(samples()), weight_version=1).critic.value_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_resume_between_batches_repeats_the_updates() -> None:
    """Bit for bit: a checkpoint holds no part of a batch."""
    one = learner(3, algorithm="ppo_clip", old_logprobs="recomputed")
    one.step(one.plan(samples()), weight_version=1)
    other = learner(3, algorithm="ppo_clip", old_logprobs="recomputed")
    other.policy.model.load_state_dict(one.policy.model.state_dict())
    other.load_state_dict(deepcopy(one.state_dict()))
    for each in (one, other):
        each.step(each.plan(samples()), weight_version=2)
    assert one.steps == other.steps == 6 and same_weights(one, other)


@pytest.mark.parametrize("old", ["behavior", "recomputed"])
def test_short_memory_in_a_later_mini_batch(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller trees where no column belongs to them; otherwise the rest is left out. The earlier
    update stays."""
    one = learner(2, algorithm="ppo_clip", old_logprobs=old)
    backward = torch.Tensor.backward
    calls: list[None] = []

    def once(self: torch.Tensor) -> None:
        calls.append(None)
        if len(calls) == 2:
            torch.empty(NO_MACHINE_HAS)
        backward(self)

    monkeypatch.setattr(torch.Tensor, "backward", once)
    one.budget.floor = 8
    result = one.step(one.plan(samples()), weight_version=1)
    assert result.skipped == "" and "allocate memory" in (result.shortage or result.cut_short)
    if old == "behavior":
        assert (result.updates, result.memory_retries, result.cut_short) == (2, 1, "")
    else:
        assert (result.updates, result.memory_retries) == (1, 0) and result.cut_short
    assert one.budget.tokens < 64


@pytest.mark.parametrize("resumed", [False, True])
def test_schedule_ends_with_the_last_batch_also_of_few_groups(
    resumed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups make two of four mini-batches; the rates of the updates that do not happen are
    left out."""
    config = LearnerConfig(
        optimizer=OptimizerConfig(learning_rate=1.0, learning_rate_schedule="linear"),
        mini_batches=4,
        passes_per_batch=1,
        total_updates=12,
    )
    rates: list[float] = []
    step = Optimizers.step

    def noted(optimizers: Optimizers, rate: float) -> None:
        rates.append(rate)
        step(optimizers, rate * 1e-3)

    monkeypatch.setattr(Optimizers, "step", noted)
    one = Learner(TreePolicy(tiny_model("qwen3", torch.float32)), config)
    few = [sample for sample in samples() if sample.group < 2]
    for batch in (samples(), few, few):
        result = one.step(one.plan(batch), weight_version=1)
        assert result.updates == (4 if batch is not few else 2)
        if resumed:
            state, one = one.state_dict(), Learner(one.policy, config)
            one.load_state_dict(deepcopy(state))
    assert rates == [config.rate(update) for update in (0, 1, 2, 3, 4, 5, 8, 9)]


def test_short_memory_for_the_old_log_probs_leaves_one_update() -> None:
    """The later mini-batches do not fit even without a gradient; the next batch is cut smaller."""
    one = learner(2, algorithm="ppo_clip", old_logprobs="recomputed")
    one.budget.floor = 8
    plan = one.plan(samples())
    first, second = (part.largest_tree for part in plan.updates)
    assert first < second
    with memory_for(one, first):
        result = one.step(plan, weight_version=1)
        assert result.skipped == "" and "out of memory" in result.cut_short
        assert (result.updates, result.memory_retries) == (1, 0)
        again = one.step(one.plan(samples()), weight_version=2)
    assert (again.updates, again.memory_retries, again.cut_short) == (2, 0, "")
