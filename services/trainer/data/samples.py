"""Builds trainable samples from recorded trajectories.

Owns the choice of trained tokens and their advantages: one sample per turn, with loss on its
sampled tokens alone, so each sampled token is trained exactly once. No I/O, no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean
from typing import Literal

from forge.client.reward_events import reward_component, reward_sum
from forge.client.trajectory_tree import turn_tokens
from forge.core.credit.advantages import GroupReturns, batch_advantages
from forge.core.credit.overlong import masked_turns, overlong_penalties
from forge.core.credit.rewards import RewardWeights, returns_to_go, speed_credits, turn_rewards
from forge.core.credit.side_calls import SideCall, side_calls
from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes, int32_array
from forge.core.trajectory import TokenTree, TurnTokens
from forge.runtime.telemetry import log
from forge.v1 import common_pb2 as pb
from services.trainer.data.chosen_turns import TurnPlace
from services.trainer.data.credit_rules import CreditRules
from services.trainer.data.engines import engine_of, engine_of_all
from services.trainer.data.grammar_correction import (
    Cut,
    cut_of,
    logprobs_without_mask,
    weighted_advantages,
)
from services.trainer.data.other_models import policy_part, policy_turns
from services.trainer.data.reward_components import reward_components
from services.trainer.data.routes import routes_of
from services.trainer.data.speed import completion_of, reported_speed, speeds_of

LeftOut = (
    Literal["empty", "aborted", "greedy", "overlong", "share_missing", "other_model"] | SideCall
)
"""Why a turn is not trained: it has no sampled token or no prompt; its agent left before the end;
it was sampled at temperature 0, so it has no distribution; a token limit cut it off, or another
turn of its trajectory; the share of allowed tokens is missing; another model than the policy
answered; it is a side call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSamples:
    """The samples of a batch, and their statistics."""

    samples: tuple[Sample, ...]
    turns: tuple[TurnPlace, ...] = ()
    """The turn of each sample, by `Sample.number`; its trained tokens are all sampled ones."""
    outcomes: Mapping[str, Sequence[float]]
    """Outcome reward of each trajectory, by domain."""
    outcomes_by_engine: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The same by engine of inference (`services.trainer.data.engines`)."""
    outcomes_by_version: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Outcome reward of each trajectory that one weight version alone sampled, by that version."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Mean of each named reward (`services.trainer.data.reward_components`)."""
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sampled tokens of each trajectory, by domain."""
    completions_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Completion time of each trajectory that has one, by domain."""
    baselines_s: Mapping[str, float] = field(default_factory=dict)
    """Completion time of speed 1/2, by domain, where known."""
    sampled_tokens: int
    groups: int
    trajectories: int
    flat_groups: int
    """Groups whose rollouts all have the same outcome and process reward."""
    excluded: int
    """Inconsistent trajectories, which are left out."""
    untimed: int = 0
    """Trajectories without a speed, since their times are not recorded."""
    cuts: Mapping[Cut, int] = field(default_factory=dict)
    """Turns by the effect of top_k and top_p; those with a missing share are left out."""
    left_out: Mapping[tuple[str, LeftOut], int] = field(default_factory=dict)
    """Turns without a sample, by domain and reason."""
    barren_domains: tuple[str, ...] = ()
    """Domains whose turns were all left out."""
    refill_groups: int = 0
    """Groups that were leased in place of flat ones."""
    overlong_penalty: float = 0.0
    """Mean over trajectories of the penalty on the length of their answers, at most 0."""

    @property
    def mean_outcome(self) -> float:
        """Mean outcome reward over trajectories; 0 without any."""
        values = [value for outcomes in self.outcomes.values() for value in outcomes]
        return fmean(values) if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollout:
    number: int
    """In the batch, as `group`."""
    group: int
    trajectory: pb.Trajectory
    turn_indices: Sequence[int]
    """In the pool, of each turn of `trajectory`."""
    tree: TokenTree
    returns: list[float]
    """Return-to-go of each turn, from outcome and process."""
    completion_s: float | None
    """None when unknown."""
    reported_speed: float | None
    """Speed that the task reported; None without one."""
    other_turns: int
    """Turns of other models, which `trajectory` lacks."""
    penalty: float
    """Sum of the penalties on the length of answers, which `returns` contain."""

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.sampled_tokens for turn in self.tree.turns)

    @property
    def version(self) -> int | None:
        """The weight version of all sampled tokens; None for several."""
        versions = [int32_array(turn.sampled.weight_versions) for turn in self.trajectory.turns]
        found = {bound for one in versions if one for bound in (min(one), max(one))}
        return found.pop() if len(found) == 1 else None


@dataclass(slots=True)
class _Columns:
    """Values of the rollouts of a batch, by domain, engine and weight version."""

    outcomes: dict[str, list[float]] = field(default_factory=dict)
    by_engine: dict[str, list[float]] = field(default_factory=dict)
    by_version: dict[int, list[float]] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    completions_s: dict[str, list[float]] = field(default_factory=dict)

    def add(self, rollout: _Rollout) -> None:
        """Add one rollout."""
        domain, outcome = rollout.trajectory.domain, _outcome(rollout)
        self.outcomes.setdefault(domain, []).append(outcome)
        engine = engine_of_all(rollout.trajectory.turns)
        self.by_engine.setdefault(engine, []).append(outcome)
        if (version := rollout.version) is not None:
            self.by_version.setdefault(version, []).append(outcome)
        self.lengths.setdefault(domain, []).append(rollout.sampled_tokens)
        if rollout.completion_s is not None:
            self.completions_s.setdefault(domain, []).append(rollout.completion_s)


def build_samples(
    groups: Sequence[Sequence[pb.Trajectory]],
    rules: CreditRules,
    *,
    baselines_s: Mapping[str, float] | None = None,
) -> BatchSamples:
    """Samples of all sealed trajectories of a batch, group by group.

    `baselines_s` are the usual completion times by domain; without one a domain has no speed.
    """
    baselines_s = baselines_s or {}
    numbers = count()
    kept = [
        [one for each in group if (one := _rollout(each, rules, next(numbers), index))]
        for index, group in enumerate(groups)
    ]
    returns = [_returns(rollouts, rules.weights, baselines_s) for rollouts in kept]
    credits = batch_advantages(returns, rules.advantages)
    samples: list[Sample] = []
    columns, turns = _Columns(), _TurnCounts()
    for rollouts, group, credit in zip(kept, returns, credits, strict=True):
        for rollout, advantages_T, speed_T in zip(
            rollouts, credit.advantages, group.speed, strict=True
        ):
            columns.add(rollout)
            if rollout.other_turns:
                domain = rollout.trajectory.domain
                turns.left_out[domain, "other_model"] += rollout.other_turns
            if not (credit.flat and rules.drop_flat_groups):
                samples += _credited_samples(rollout, advantages_T, speed_T, rules, turns)
    everyone = [rollout for rollouts in kept for rollout in rollouts]
    return BatchSamples(
        samples=tuple(samples),
        turns=tuple(turns.places),
        outcomes=columns.outcomes,
        outcomes_by_engine=columns.by_engine,
        outcomes_by_version=columns.by_version,
        reward_components=reward_components(one.trajectory for one in everyone),
        lengths=columns.lengths,
        completions_s=columns.completions_s,
        baselines_s=baselines_s,
        sampled_tokens=sum(one.sampled_tokens for one in everyone),
        groups=len(groups),
        trajectories=len(everyone),
        flat_groups=sum(credit.flat for credit in credits),
        excluded=sum(map(len, groups)) - len(everyone),
        untimed=sum(one.completion_s is None and one.reported_speed is None for one in everyone),
        cuts=turns.cuts,
        left_out=turns.left_out,
        barren_domains=turns.barren_domains(),
        overlong_penalty=fmean([one.penalty for one in everyone]) if everyone else 0.0,
    )


def _credited_samples(
    rollout: _Rollout,
    advantages_T: Sequence[float],
    speed_T: Sequence[float],
    rules: CreditRules,
    turns: _TurnCounts,
) -> list[Sample]:
    """Samples with the advantages, or for a critic with its targets."""
    if not rules.critic:
        return _turn_samples(rollout, advantages_T, rules, turns)
    # The factor alone: the critic computes the advantage.
    factor = rules.advantages.domain_weights.get(rollout.trajectory.domain, 1.0)
    targets_T = [one + speed for one, speed in zip(rollout.returns, speed_T, strict=True)]
    return _turn_samples(rollout, [factor] * len(targets_T), rules, turns, targets_T)


def _returns(
    rollouts: Sequence[_Rollout], weights: RewardWeights, baselines_s: Mapping[str, float]
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


def _rollout(
    trajectory: pb.Trajectory, rules: CreditRules, number: int, group: int
) -> _Rollout | None:
    """None for an inconsistent trajectory, which must not stop the batch."""
    completion_s = completion_of(trajectory, tokens_per_s=rules.tokens_per_s)
    speed = reported_speed(trajectory)
    turn_indices = policy_turns(trajectory)
    trajectory, other_turns = policy_part(trajectory)
    try:
        tree = TokenTree([_trained_tokens(turn) for turn in trajectory.turns])
        rewards_T = turn_rewards(
            [reward_component(event) for event in trajectory.rewards],
            turns=len(trajectory.turns),
            weights=rules.weights,
        )
    except InvalidArgument as error:
        log.error("trajectory_excluded", trajectory_id=trajectory.trajectory_id, error=str(error))
        return None
    penalties_T = overlong_penalties([turn.sampled_tokens for turn in tree.turns], rules.overlong)
    rewards_T = [earned + penalty for earned, penalty in zip(rewards_T, penalties_T, strict=True)]
    return _Rollout(
        number=number,
        group=group,
        trajectory=trajectory,
        turn_indices=turn_indices,
        tree=tree,
        returns=returns_to_go(rewards_T, gamma=rules.weights.gamma),
        completion_s=completion_s,
        reported_speed=speed,
        other_turns=other_turns,
        penalty=sum(penalties_T),
    )


@dataclass(slots=True)
class _TurnCounts:
    """Counts the turns of a batch and decides which are trained."""

    cuts: Counter[Cut] = field(default_factory=Counter)
    left_out: Counter[tuple[str, LeftOut]] = field(default_factory=Counter)
    trained: set[str] = field(default_factory=set)
    """Domains with a trained turn."""
    places: list[TurnPlace] = field(default_factory=list)
    """Of the trained turns."""

    def count_turn(
        self, domain: str, record: pb.Turn, reason: LeftOut | None, *, start: int, length: int
    ) -> bool:
        """Whether the turn, sampled from `start` to `length`, is trained; `reason` excludes it."""
        if start in (0, length):
            reason = "empty"
        # The agent did not receive the answer, so no reward depends on it.
        elif record.finish_reason == pb.FINISH_REASON_ABORTED:
            reason = "aborted"
        elif record.temperature <= 0:
            reason = "greedy"
        elif reason is None:
            cut = cut_of(record)
            self.cuts[cut] += 1
            if cut == "share_missing":
                reason = cut
        if reason is None:
            self.trained.add(domain)
        else:
            self.left_out[domain, reason] += 1
        return reason is None

    def number(self, rollout: _Rollout, index: int) -> int:
        """The number of the sample of a trained turn."""
        place = TurnPlace(rollout.trajectory.trajectory_id, rollout.turn_indices[index])
        self.places.append(place)
        return len(self.places) - 1

    def barren_domains(self) -> tuple[str, ...]:
        """Domains whose turns were all left out."""
        return tuple(sorted({domain for domain, _ in self.left_out} - self.trained))


def _turn_samples(
    rollout: _Rollout,
    advantages_T: Sequence[float],
    rules: CreditRules,
    counts: _TurnCounts,
    targets_T: Sequence[float] = (),
) -> list[Sample]:
    """One sample per trainable turn; `targets_T` are the critic's targets."""
    samples = []
    domain = rollout.trajectory.domain
    lengths = rollout.tree.lengths
    contexts = [
        length - turn.sampled_tokens
        for length, turn in zip(lengths, rollout.tree.turns, strict=True)
    ]
    aside = side_calls(rollout.trajectory.turns, contexts)
    if domain in rules.train_side_calls:
        aside = {index: why for index, why in aside.items() if why == "excluded"}
    cut_off = [one.finish_reason == pb.FINISH_REASON_LENGTH for one in rollout.trajectory.turns]
    masked = masked_turns(cut_off, rules.overlong)
    routes = routes_of(rollout.trajectory.turns, lengths)
    for index, (turn, record) in enumerate(
        zip(rollout.tree.turns, rollout.trajectory.turns, strict=True)
    ):
        start, length = contexts[index], lengths[index]
        why = aside.get(index) or ("overlong" if masked[index] else None)
        if not counts.count_turn(domain, record, why, start=start, length=length):
            continue
        samples.append(
            Sample(
                ids=rollout.tree.sequence(index),
                trained=((start, length),),
                behavior_logprobs=turn.logprobs,
                weight_versions=turn.weight_versions,
                advantages=weighted_advantages(record.sampled, advantages_T[index]),
                temperature=record.temperature,
                returns=float32_bytes([targets_T[index]]) * turn.sampled_tokens
                if targets_T
                else b"",
                domain=domain,
                engine=engine_of(record),
                trajectory=rollout.number,
                group=rollout.group,
                number=counts.number(rollout, index),
                routes=routes[index],
            )
        )
    return samples


def _outcome(rollout: _Rollout) -> float:
    return reward_sum(rollout.trajectory.rewards) or 0.0


def _trained_tokens(turn: pb.Turn) -> TurnTokens:
    tokens = turn_tokens(turn)
    if cut_of(turn) == "share_missing":
        return tokens
    return replace(tokens, logprobs=logprobs_without_mask(turn.sampled))
