"""Trajectories become samples: which tokens are trained, and with which advantage."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from forge.core.credit.advantages import AdvantageRules
from forge.core.credit.overlong import OverlongRules
from forge.core.credit.rewards import RewardWeights
from forge.core.token_columns import float32_array, int32_array, int32_bytes
from forge.v1 import common_pb2 as pb
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.samples import build_samples
from tests.support.trainer.trajectories import outcome, reward, trajectory, turn

RULES = CreditRules(weights=RewardWeights(alpha=0.5, beta=0.25, gamma=1.0))


def one_turn(value: float, **settings: str) -> pb.Trajectory:
    return trajectory([turn(0, [1, 2], [3])], [outcome(value)], **settings)


def test_each_turn_is_a_sample_of_its_whole_sequence() -> None:
    """Contexts are rebuilt; the loss is on sampled tokens, each exactly once."""
    turns = [turn(0, [1, 2], [3, 4]), turn(1, [5], [6], parent=0, prefix=4)]
    samples = build_samples([[trajectory(turns, [outcome(1)])]], RULES).samples
    assert [int32_array(one.ids).tolist() for one in samples] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
    ]
    assert [one.trained for one in samples] == [((2, 4),), ((5, 6),)]
    assert float32_array(samples[0].behavior_logprobs).tolist() == [-0.5, -1.5]
    assert int32_array(samples[0].weight_versions).tolist() == [3, 3]
    assert samples[0].temperature == pytest.approx(0.7)


def test_samples_and_rewards_have_the_engine_that_sampled() -> None:
    """A turn that moved has several, as has a trajectory of unlike turns; records of an earlier
    release have none."""
    moved, mixed = ["vllm", "embedded+vllm"], ["embedded", "vllm"]
    named = [["vllm", "vllm"], moved, mixed, ["", ""], ["embedded"]]
    group = []
    for number, names in enumerate(named):
        turns = [turn(0, [1, 2], [3, 4]), turn(1, [5], [6], parent=0, prefix=4)][: len(names)]
        for one, name in zip(turns, names, strict=True):
            one.engine = name
        group.append(trajectory(turns, [outcome(number)]))
    batch = build_samples([group], RULES)
    assert [one.engine for one in batch.samples] == [
        *("vllm", "vllm", "vllm", "several", "embedded", "vllm", "unknown", "unknown", "embedded")
    ]
    assert batch.outcomes_by_engine == {
        "vllm": [0.0],
        "several": [1.0, 2.0],
        "unknown": [3.0],
        "embedded": [4.0],
    }


def test_branch_trains_its_own_sampled_tokens() -> None:
    """The tokens it dropped are trained in their own sample."""
    turns = [turn(0, [1, 2], [3, 4]), turn(1, [9], [8], parent=0, prefix=2)]
    samples = build_samples([[trajectory(turns, [outcome(1)])]], RULES).samples
    assert [int32_array(one.ids).tolist() for one in samples] == [[1, 2, 3, 4], [1, 2, 9, 8]]


def test_advantages_are_returns_to_go_minus_the_group_mean() -> None:
    """Two turns: process -1 on the first, outcome 1; the other rollout fails.

    G = (-.5 + 1, 1) and (0); the totals' mean is .25.
    """
    first = trajectory(
        [turn(0, [1], [2]), turn(1, [3], [4], parent=0, prefix=2)],
        [reward(pb.REWARD_KIND_PROCESS, -1.0, 0), outcome(1)],
    )
    second = trajectory([turn(0, [1], [5])], [outcome(0)])
    samples = build_samples([[first, second]], RULES).samples
    assert [float32_array(one.advantages).tolist() for one in samples] == [[0.25], [0.75], [-0.25]]


def test_agent_rewards_do_not_count_by_default() -> None:
    """Equal outcomes stay a flat group for any agent rewards; a weight makes them differ."""
    boast = reward(pb.REWARD_KIND_AGENT, 1.0)
    group = [trajectory([turn(0, [1], [2])], [outcome(1), boast]), one_turn(1)]
    batch = build_samples([group], RULES)
    assert (batch.flat_groups, batch.excluded, batch.mean_outcome) == (1, 0, 1.0)
    weighted = replace(RULES, weights=replace(RULES.weights, agent=0.5))
    samples = build_samples([group], weighted).samples
    assert [float32_array(one.advantages)[0] for one in samples] == [0.25, -0.25]


def test_critic_gets_returns_and_advantage_factors() -> None:
    """Each turn's return-to-go on its tokens; the domain's weight in place of advantages."""
    first = trajectory(
        [turn(0, [1], [2, 3]), turn(1, [4], [5], parent=0, prefix=3)],
        [reward(pb.REWARD_KIND_PROCESS, -1.0, 0), outcome(1)],
    )
    rules = replace(
        RULES,
        critic=True,
        advantages=AdvantageRules(baseline="none", domain_weights={"code": 2.0}),
    )
    samples = build_samples([[first]], rules).samples
    assert [float32_array(one.returns).tolist() for one in samples] == [[0.5, 0.5], [1.0]]
    assert [float32_array(one.advantages).tolist() for one in samples] == [[2.0, 2.0], [2.0]]
    assert not build_samples([[first]], RULES).samples[0].returns


def test_groups_do_not_share_a_baseline() -> None:
    """Each group is compared with itself; equal rewards make it flat."""
    batch = build_samples(
        [[one_turn(1), one_turn(1)], [one_turn(1), one_turn(0, domain="qa")]], RULES
    )
    advantages = [float32_array(one.advantages)[0] for one in batch.samples]
    assert advantages == [0.0, 0.0, 0.5, -0.5]
    assert (batch.groups, batch.trajectories, batch.flat_groups) == (2, 4, 1)
    assert batch.outcomes == {"code": [1, 1, 1], "qa": [0]}
    assert batch.lengths == {"code": [1, 1, 1], "qa": [1]}
    assert [one.domain for one in batch.samples] == ["code", "code", "code", "qa"]
    assert batch.mean_outcome == 0.75


def test_flat_groups_can_be_left_out_of_the_loss() -> None:
    """They give no samples, and are reported as before."""
    groups = [[one_turn(1), one_turn(1)], [one_turn(1), one_turn(0)]]
    batch = build_samples(groups, replace(RULES, drop_flat_groups=True))
    assert [float32_array(one.advantages)[0] for one in batch.samples] == [0.5, -0.5]
    assert (batch.flat_groups, batch.trajectories, batch.mean_outcome) == (1, 4, 0.75)


def test_domains_have_weights_and_the_batch_a_spread() -> None:
    """Centered totals are all 0.5 in size, so the spread is 0.5; code counts twice."""
    rules = replace(RULES, advantages=AdvantageRules(spread="batch", domain_weights={"code": 2.0}))
    groups = [[one_turn(1, domain=name), one_turn(0, domain=name)] for name in ("code", "qa")]
    samples = build_samples(groups, rules).samples
    assert [float32_array(one.advantages)[0] for one in samples] == [2.0, -2.0, 1.0, -1.0]


@pytest.mark.parametrize("temperature", [0.0, 1e-38])
def test_aborted_and_greedy_turns_are_not_trained(temperature: float) -> None:
    """The agent did not see the first; the second has no distribution, also at a temperature that
    an earlier release recorded: its inverse would be a factor of the gradient."""
    aborted, greedy = turn(0, [1], [2]), turn(1, [1], [2])
    aborted.finish_reason = pb.FINISH_REASON_ABORTED
    greedy.temperature = temperature
    batch = build_samples([[trajectory([aborted, greedy], [outcome(1)])]], RULES)
    assert batch.samples == () and batch.trajectories == 1


def cut_off(value: float) -> pb.Trajectory:
    """Two answers; a token limit ended the first one, of three tokens."""
    turns = [turn(0, [1], [2, 3, 4]), turn(1, [1, 9], [5])]
    turns[0].finish_reason = pb.FINISH_REASON_LENGTH
    return trajectory(turns, [outcome(value)])


@pytest.mark.parametrize(("mask", "trained"), [("none", 3), ("turn", 2), ("trajectory", 1)])
def test_answer_that_a_token_limit_cut_off_is_masked(
    mask: Literal["none", "turn", "trajectory"], trained: int
) -> None:
    """The turn, or all turns of its trajectory; counted, and still part of the baseline."""
    rules = replace(RULES, overlong=OverlongRules(mask=mask))
    batch = build_samples([[cut_off(0), one_turn(1)]], rules)
    assert len(batch.samples) == trained
    assert float32_array(batch.samples[-1].advantages)[0] == 0.5
    assert sum(batch.left_out.values()) == 3 - trained
    assert {reason for _, reason in batch.left_out} <= {"overlong"}


@pytest.mark.parametrize("mask", ["turn", "trajectory"])
def test_side_call_that_a_token_limit_cut_off_masks_no_other_turn(
    mask: Literal["turn", "trajectory"],
) -> None:
    """Titles and probes of a model have small limits."""
    title, answer = turn(0, [1], [2]), turn(1, [7], [5])
    title.finish_reason, title.train = pb.FINISH_REASON_LENGTH, False
    rules = replace(RULES, overlong=OverlongRules(mask=mask))
    batch = build_samples([[trajectory([title, answer], [outcome(1)]), one_turn(0)]], rules)
    assert list(int32_array(batch.samples[0].ids)) == [7, 5] and len(batch.samples) == 2
    assert [reason for _, reason in batch.left_out] == ["excluded"]
    assert sum(batch.left_out.values()) == 1


def test_long_answer_costs_reward_where_credit_is_computed() -> None:
    """Three tokens of at most three, the last two the cache: the first turn's reward falls by 1,
    and the baseline with it. The outcome stays as the task gave it."""
    rules = replace(RULES, overlong=OverlongRules(max_tokens=3, cache_tokens=2))
    batch = build_samples([[cut_off(1), one_turn(1)]], rules)
    advantages = [float32_array(one.advantages)[0] for one in batch.samples]
    # G = (1 - 1, 1) and (1); their totals' mean is 1/2.
    assert advantages == [-0.5, 0.5, 0.5]
    assert (batch.overlong_penalty, batch.mean_outcome, batch.flat_groups) == (-0.5, 1.0, 0)


def test_samples_of_a_trajectory_have_its_number() -> None:
    """Numbers are unique over the groups of a batch."""
    batch = build_samples([[cut_off(0), one_turn(1)], [one_turn(1)]], RULES)
    assert [one.trajectory for one in batch.samples] == [0, 0, 1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        trajectory([turn(0, [1], [2])], [reward(pb.REWARD_KIND_OUTCOME, 1.0, 5)]),
        trajectory([turn(0, [1], [2])], [reward(pb.REWARD_KIND_OUTCOME, float("nan"))]),
        trajectory([turn(0, [1], [2])], [reward(pb.REWARD_KIND_UNSPECIFIED, 1.0)]),
        trajectory([turn(0, [1], [2], prefix=3)], [outcome(1)]),
        # Stored by an earlier version: the grader's outcome, and one that the agent set.
        trajectory([turn(0, [1], [2])], [outcome(0), outcome(1000)]),
        trajectory([], [outcome(1)]),
        trajectory([turn(0, [1], [2, 9])], [outcome(1)]),
        trajectory([turn(0, [1], [2]), turn(1, [-1], [2])], [outcome(1)]),
    ],
)
def test_inconsistent_trajectory_is_left_out(bad: pb.Trajectory) -> None:
    """It is counted, it shifts no baseline, and the rest of the batch is trained."""
    rules = replace(RULES, vocabulary=9)
    batch = build_samples([[bad, one_turn(1), one_turn(0)]], rules)
    assert (batch.excluded, batch.trajectories) == (1, 2)
    assert [float32_array(one.advantages)[0] for one in batch.samples] == [0.5, -0.5]


def test_outcome_belongs_to_a_version_that_sampled_alone() -> None:
    """A trajectory of two versions tells nothing of either."""
    mixed = trajectory([turn(0, [1], [3]), turn(1, [5], [6, 7], parent=0, prefix=2)], [outcome(1)])
    mixed.turns[1].sampled.weight_versions = int32_bytes([3, 4])
    other = one_turn(0.5)
    other.turns[0].sampled.weight_versions = int32_bytes([4])
    batch = build_samples([[one_turn(1.0), mixed], [one_turn(0.0), other]], RULES)
    assert batch.outcomes_by_version == {3: [1.0, 0.0], 4: [0.5]}
