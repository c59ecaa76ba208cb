"""The samples and statistics of a batch, from the facts of its groups.

Owns what depends on several groups: advantages, numbers of samples, and statistics. The same facts
give the same batch for any division of reading among ranks. No I/O, no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from forge.core.credit.advantages import batch_advantages
from forge.core.prefix_tree import Sample
from forge.v1 import common_pb2 as pb
from services.trainer.samples.chosen_turns import SampleSize, TurnPlace
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.grammar_correction import Cut
from services.trainer.samples.group_facts import (
    GroupCredit,
    GroupFacts,
    RolloutFacts,
    group_samples,
    read_group,
)
from services.trainer.samples.reward_components import reward_components
from services.trainer.samples.rollouts import LeftOut


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSamples:
    """The samples of a batch, and their statistics."""

    samples: tuple[Sample, ...]
    """Empty if ranks have read them."""
    turns: tuple[TurnPlace, ...] = ()
    """The turn of each sample, by `Sample.number`; its trained tokens are all sampled ones."""
    sizes: tuple[SampleSize, ...] = ()
    """By the same number."""
    outcomes: Mapping[str, Sequence[float]]
    """Outcome reward of each trajectory, by domain."""
    outcomes_by_engine: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Outcome rewards by engine (`services.trainer.samples.engines`)."""
    outcomes_by_version: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Outcome reward of each trajectory that one weight version alone sampled, by that version."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Mean of each named reward (`services.trainer.samples.reward_components`)."""
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sampled tokens of each trajectory, by domain."""
    completions_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Completion time of each trajectory that has one, by domain."""
    baselines_s: Mapping[str, float] = field(default_factory=dict)
    """Completion time of speed 1/2, by domain, where known."""
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
    untrained_domains: tuple[str, ...] = ()
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


@dataclass(slots=True)
class _Columns:
    """Values of the rollouts of a batch, by domain, engine and weight version."""

    outcomes: dict[str, list[float]] = field(default_factory=dict)
    by_engine: dict[str, list[float]] = field(default_factory=dict)
    by_version: dict[int, list[float]] = field(default_factory=dict)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    completions_s: dict[str, list[float]] = field(default_factory=dict)

    def add(self, rollout: RolloutFacts) -> None:
        """Add one rollout."""
        domain, outcome = rollout.domain, rollout.outcome
        self.outcomes.setdefault(domain, []).append(outcome)
        self.by_engine.setdefault(rollout.engine, []).append(outcome)
        if rollout.version is not None:
            self.by_version.setdefault(rollout.version, []).append(outcome)
        self.lengths.setdefault(domain, []).append(rollout.sampled_tokens)
        if rollout.completion_s is not None:
            self.completions_s.setdefault(domain, []).append(rollout.completion_s)


@dataclass(slots=True)
class _TurnCounts:
    """Counts and numbers the turns of a batch."""

    cuts: Counter[Cut] = field(default_factory=Counter)
    left_out: Counter[tuple[str, LeftOut]] = field(default_factory=Counter)
    trained: set[str] = field(default_factory=set)
    """Domains with a trained turn."""
    places: list[TurnPlace] = field(default_factory=list)
    """Places of the trained turns."""
    sizes: list[SampleSize] = field(default_factory=list)

    def add(self, facts: GroupFacts, group: int) -> None:
        """Add the turns of a trained group."""
        self.cuts.update(facts.cuts)
        self.left_out.update(facts.left_out)
        for rollout in facts.rollouts:
            for place, tokens in rollout.trained:
                self.trained.add(rollout.domain)
                self.sizes.append(SampleSize(len(self.places), group, tokens))
                self.places.append(place)

    def untrained_domains(self) -> tuple[str, ...]:
        """Domains whose turns were all left out."""
        return tuple(sorted({domain for domain, _ in self.left_out} - self.trained))


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
    read = [read_group(group, rules, baselines_s) for group in groups]
    batch, credits = merged([one.facts for one in read], rules, baselines_s=baselines_s)
    samples = [
        sample
        for one, credit in zip(read, credits, strict=True)
        for sample in group_samples(one, credit, rules)
    ]
    return replace(batch, samples=tuple(samples))


def merged(
    groups: Sequence[GroupFacts], rules: CreditRules, *, baselines_s: Mapping[str, float]
) -> tuple[BatchSamples, list[GroupCredit]]:
    """The batch of groups without its samples, and what it decides about each group."""
    credits = batch_advantages([one.returns for one in groups], rules.advantages)
    columns, turns = _Columns(), _TurnCounts()
    decided: list[GroupCredit] = []
    trajectories = 0
    for number, (facts, credit) in enumerate(zip(groups, credits, strict=True)):
        trained = not (credit.flat and rules.drop_flat_groups)
        decided.append(
            GroupCredit(
                group=number,
                first_trajectory=trajectories,
                first_sample=len(turns.places),
                credit=credit,
                trained=trained,
            )
        )
        trajectories += facts.trajectories
        for rollout in facts.rollouts:
            columns.add(rollout)
            if rollout.other_turns:
                turns.left_out[rollout.domain, "other_model"] += rollout.other_turns
        if trained:
            turns.add(facts, number)
    flat_groups = sum(credit.flat for credit in credits)
    batch = _batch(groups, columns, turns, baselines_s=baselines_s, flat_groups=flat_groups)
    return batch, decided


def _batch(
    groups: Sequence[GroupFacts],
    columns: _Columns,
    turns: _TurnCounts,
    *,
    baselines_s: Mapping[str, float],
    flat_groups: int,
) -> BatchSamples:
    everyone = [rollout for facts in groups for rollout in facts.rollouts]
    return BatchSamples(
        samples=(),
        turns=tuple(turns.places),
        sizes=tuple(turns.sizes),
        outcomes=columns.outcomes,
        outcomes_by_engine=columns.by_engine,
        outcomes_by_version=columns.by_version,
        reward_components=reward_components(one.rewards for one in everyone),
        lengths=columns.lengths,
        completions_s=columns.completions_s,
        baselines_s=baselines_s,
        groups=len(groups),
        trajectories=len(everyone),
        flat_groups=flat_groups,
        excluded=sum(one.trajectories for one in groups) - len(everyone),
        untimed=sum(not one.timed for one in everyone),
        cuts=turns.cuts,
        left_out=turns.left_out,
        untrained_domains=turns.untrained_domains(),
        overlong_penalty=fmean([one.penalty for one in everyone]) if everyone else 0.0,
    )
