"""Speed beside outcomes: what it may add to an advantage, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from forge.core.rewards import speed_reward
from forge.core.trajectory import float32_array
from forge.runtime.config import load
from forge.v1 import common_pb2 as pb
from services.trainer.config import TrainerConfig
from services.trainer.samples import BatchSamples, CreditRules, build_samples
from tests.unit.trainer.test_trainer_samples import outcome, reward, trajectory, turn

PRESETS = ("cispo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "reinforce")
BASELINE_S = 2.0


def rules_of(algorithm: str, *options: str) -> CreditRules:
    argv = ["--algorithm", algorithm, *options]
    return load(TrainerConfig, service="trainer", argv=argv, environ={}).credit_rules()


def told(solved: float, completion_s: float) -> pb.Trajectory:
    """A rollout that reports its own speed."""
    speed = reward(pb.REWARD_KIND_SPEED, speed_reward(completion_s, BASELINE_S))
    return trajectory([turn(0, [1, 2], [3])], [outcome(solved), speed])


def advantages(batch: BatchSamples) -> Sequence[float]:
    return [float(float32_array(sample.advantages)[0]) for sample in batch.samples]


@pytest.mark.parametrize("algorithm", PRESETS)
def test_50_us_of_tool_time_are_no_advantage(algorithm: str) -> None:
    """Four equally correct rollouts whose tools differ by 50 us are a flat group, without any."""
    group = [told(1, 1.0 + 50e-6 * late) for late in range(4)]
    batch = build_samples([group], rules_of(algorithm))
    assert advantages(batch) == pytest.approx([0.0] * 4, abs=1e-9)
    assert batch.flat_groups == 1


@pytest.mark.parametrize("algorithm", ["cispo", "grpo", "dr_grpo", "dapo", "gspo", "rloo"])
def test_a_group_that_differs_in_speed_alone_is_flat(algorithm: str) -> None:
    """With drop_flat_groups nothing of it is trained."""
    group = [told(1, seconds) for seconds in (1.0, 2.0, 4.0, 9.0)]
    batch = build_samples([group], rules_of(algorithm, "--drop-flat-groups"))
    assert (batch.flat_groups, batch.samples) == (1, ())


@pytest.mark.parametrize("algorithm", PRESETS)
def test_speed_adds_the_same_whatever_the_spread_of_outcomes(algorithm: str) -> None:
    """At 2 s and 6 s of 2 s speeds are 1/2 and 1/4, a group mean of 3/8: beta times an eighth, in
    steps of 0.05, is 0.01 more for the fast one and 0.01 less for the slow one."""
    rules = rules_of(algorithm)
    plain = replace(rules, weights=replace(rules.weights, beta=0.0))
    for outcomes in ((1, 1), (1, 0), (0, 1)):
        group = [told(outcomes[0], 2.0), told(outcomes[1], 6.0)]
        without = advantages(build_samples([group], plain))
        found = advantages(build_samples([group], rules))
        gained = [one - other for one, other in zip(found, without, strict=True)]
        assert gained == pytest.approx([0.01, -0.01], abs=1e-6)


def test_speed_is_credited_as_the_last_turns_is() -> None:
    """Discounted towards the first turn; a rollout without turns takes no part."""
    rules = rules_of("cispo", "--gamma", "0.5", "--beta", "1")
    fast = trajectory(
        [turn(0, [1], [2]), turn(1, [3], [4], parent=0, prefix=2)],
        [reward(pb.REWARD_KIND_SPEED, 0.75)],
    )
    slow = trajectory([turn(0, [1], [5])], [reward(pb.REWARD_KIND_SPEED, 0.5)])
    found = advantages(build_samples([[fast, slow, trajectory([], [])]], rules))
    assert found == pytest.approx([0.05, 0.1, -0.1])


def test_a_critic_is_taught_speed_with_the_return() -> None:
    """Its target is the return-to-go and what speed adds."""
    batch = build_samples([[told(1, 2.0), told(1, 6.0)]], rules_of("ppo"))
    returns = [float(float32_array(sample.returns)[0]) for sample in batch.samples]
    assert returns == pytest.approx([1.01, 0.99])
