"""Facts of a group for its batch, without tokens, and the samples of a group with its credit.

Owns the division of a group's data into facts, which are small, travel between ranks and merge to
the statistics of a batch, and samples, which stay where the group was read. No I/O, no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge.client.reward_events import reward_sum
from forge.core.credit.advantages import GroupAdvantages, GroupReturns
from forge.core.credit.rewards import RewardWeights, returns_to_go, speed_credits
from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes
from forge.v1 import common_pb2 as pb
from services.trainer.samples.chosen_turns import TurnPlace
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.engines import engine_of, engine_of_all
from services.trainer.samples.grammar_correction import (
    Cut,
    allowed_shares,
    weighted_advantages,
)
from services.trainer.samples.reward_components import named_rewards
from services.trainer.samples.rollouts import (
    ChosenTurn,
    LeftOut,
    ScoredTrajectory,
    chosen_turns,
    read_rollouts,
)
from services.trainer.samples.routes import routes_of
from services.trainer.samples.speed import speeds_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFacts:
    """Facts of one rollout."""

    domain: str
    outcome: float
    engine: str
    version: int | None
    """Weight version of all its sampled tokens; None for several."""
    sampled_tokens: int
    completion_s: float | None
    timed: bool
    """The rollout has a completion time, or the task reported a speed."""
    penalty: float
    rewards: tuple[tuple[str, float], ...]
    """Named rewards (`services.trainer.samples.reward_components`)."""
    other_turns: int
    trained: tuple[tuple[TurnPlace, int], ...]
    """Trained turns, and the trained tokens of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Facts of the group of one task."""

    returns: GroupReturns
    rollouts: tuple[RolloutFacts, ...]
    trajectories: int
    """With inconsistent ones, which are no rollouts."""
    cuts: Mapping[Cut, int]
    """Turns by the effect of cuts; this and the next one count if the group is trained."""
    left_out: Mapping[tuple[str, LeftOut], int]
    """Turns without a sample, by domain and reason, but those of other models."""

    @property
    def samples(self) -> int:
        """Trained turns."""
        return sum(len(one.trained) for one in self.rollouts)

    @property
    def trained_tokens(self) -> int:
        """Trained tokens of all samples."""
        return sum(tokens for one in self.rollouts for _, tokens in one.trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCredit:
    """Decisions of a batch about a group: the numbers and advantages of its samples."""

    group: int
    """`Sample.group`."""
    first_trajectory: int
    """`Sample.trajectory` of its first one."""
    first_sample: int
    """`Sample.number` of its first one."""
    credit: GroupAdvantages
    trained: bool
    """False: it has no samples, since it is flat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadGroup:
    """A group that was read."""

    rollouts: list[ScoredTrajectory]
    choices: list[list[ChosenTurn]]
    """Per rollout and turn."""
    facts: GroupFacts


def read_group(
    group: Sequence[pb.Trajectory], rules: CreditRules, baselines_s: Mapping[str, float]
) -> ReadGroup:
    """The rollouts of a group and their facts; `baselines_s` as for `build_samples`."""
    rollouts = read_rollouts(group, rules)
    choices = [chosen_turns(one, rules) for one in rollouts]
    cuts: Counter[Cut] = Counter()
    left_out: Counter[tuple[str, LeftOut]] = Counter()
    for rollout, chosen in zip(rollouts, choices, strict=True):
        cuts.update(one.cut for one in chosen if one.cut is not None)
        domain = rollout.trajectory.domain
        left_out.update((domain, one.left_out) for one in chosen if one.left_out is not None)
    facts = GroupFacts(
        returns=_returns(rollouts, rules.weights, baselines_s),
        rollouts=tuple(map(_facts, rollouts, choices)),
        trajectories=len(group),
        cuts=cuts,
        left_out=left_out,
    )
    return ReadGroup(rollouts=rollouts, choices=choices, facts=facts)


def _facts(rollout: ScoredTrajectory, chosen: Sequence[ChosenTurn]) -> RolloutFacts:
    trajectory = rollout.trajectory
    return RolloutFacts(
        domain=trajectory.domain,
        outcome=reward_sum(trajectory.rewards) or 0.0,
        engine=engine_of_all(trajectory.turns),
        version=rollout.version,
        sampled_tokens=rollout.sampled_tokens,
        completion_s=rollout.completion_s,
        timed=rollout.completion_s is not None or rollout.reported_speed is not None,
        penalty=rollout.penalty,
        rewards=named_rewards(trajectory),
        other_turns=rollout.other_turns,
        trained=tuple(
            (
                TurnPlace(trajectory.trajectory_id, rollout.turn_indices[one.index]),
                rollout.tree.turns[one.index].sampled_tokens,
            )
            for one in chosen
            if one.left_out is None
        ),
    )


def _returns(
    rollouts: Sequence[ScoredTrajectory], weights: RewardWeights, baselines_s: Mapping[str, float]
) -> GroupReturns:
    """Returns of a group, which has one task and so one domain."""
    domain = rollouts[0].trajectory.domain if rollouts else ""
    speeds = speeds_of(
        [rollout.reported_speed for rollout in rollouts],
        [rollout.completion_s for rollout in rollouts],
        baseline_s=baselines_s.get(domain),
    )
    credits = speed_credits(speeds, weights)
    return GroupReturns(
        returns=[rollout.returns for rollout in rollouts],
        speed=[
            _earned_last(credit, turns=len(rollout.returns), gamma=weights.gamma)
            for rollout, credit in zip(rollouts, credits, strict=True)
        ],
        domain=domain,
    )


def _earned_last(credit: float, *, turns: int, gamma: float) -> list[float]:
    """Return-to-go of each turn when only the last turn has a reward."""
    return returns_to_go([0.0] * (turns - 1) + [credit] if turns else [], gamma=gamma)


def group_samples(read: ReadGroup, decided: GroupCredit, rules: CreditRules) -> list[Sample]:
    """The samples of a group, numbered and credited as its batch decided."""
    samples: list[Sample] = []
    if not decided.trained:
        return samples
    for place, (rollout, chosen) in enumerate(zip(read.rollouts, read.choices, strict=True)):
        advantages_T, targets_T = decided.credit.advantages[place], None
        if rules.critic:
            # The factor alone: the critic computes the advantage.
            factor = rules.advantages.domain_weights.get(rollout.trajectory.domain, 1.0)
            speed_T = read.facts.returns.speed[place]
            targets_T = [one + speed for one, speed in zip(rollout.returns, speed_T, strict=True)]
            advantages_T = [factor] * len(targets_T)
        first = decided.first_sample + len(samples)
        samples += _turn_samples(rollout, chosen, advantages_T, targets_T, decided, first)
    return samples


def _turn_samples(
    rollout: ScoredTrajectory,
    chosen: Sequence[ChosenTurn],
    advantages_T: Sequence[float],
    targets_T: Sequence[float] | None,
    decided: GroupCredit,
    first: int,
) -> list[Sample]:
    """One sample per trained turn, numbered from `first` on; `targets_T` are the critic's."""
    records, lengths = rollout.trajectory.turns, rollout.tree.lengths
    routes = routes_of(records, lengths)
    samples: list[Sample] = []
    for one in chosen:
        if one.left_out is not None:
            continue
        index, record, turn = one.index, records[one.index], rollout.tree.turns[one.index]
        returns = b""
        if targets_T is not None:
            returns = float32_bytes([targets_T[index]]) * turn.sampled_tokens
        samples.append(
            Sample(
                ids=rollout.tree.sequence(index),
                trained=((one.start, lengths[index]),),
                behavior_logprobs=turn.logprobs,
                weight_versions=turn.weight_versions,
                advantages=weighted_advantages(record.sampled, advantages_T[index]),
                temperature=record.temperature,
                returns=returns,
                shares=allowed_shares(record.sampled),
                domain=rollout.trajectory.domain,
                engine=engine_of(record),
                trajectory=decided.first_trajectory + rollout.place,
                group=decided.group,
                number=first + len(samples),
                routes=routes[index],
            )
        )
    return samples
