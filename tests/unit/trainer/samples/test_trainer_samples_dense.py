"""Random groups under random rules: samples and advantages are those of docs/training.md, written
out.

Turns fork, are empty, greedy, aborted, cut off or under a grammar; groups have one rollout or
several, flat ones too.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

import pytest

from forge.core.credit.advantages import AdvantageRules
from forge.core.credit.overlong import OverlongRules
from forge.core.credit.rewards import RewardWeights
from forge.core.token_columns import float32_array, float32_bytes, int32_array, int32_bytes
from forge.v1 import common_pb2 as pb
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.samples import build_samples

OUTCOME, PROCESS = pb.REWARD_KIND_OUTCOME, pb.REWARD_KIND_PROCESS
SPEED, AGENT = pb.REWARD_KIND_SPEED, pb.REWARD_KIND_AGENT

Group = list[pb.Trajectory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A sample."""

    ids: list[int]
    logprobs: list[float]
    advantages: list[float]


def turn(rng: Random, index: int, lengths: list[int]) -> pb.Turn:
    """A turn that extends an earlier one, or none; `lengths` gets that of its sequence."""
    parent = rng.choice([-1, index - 1, rng.randrange(index)]) if index else -1
    prefix = rng.randint(0, lengths[parent]) if parent >= 0 else 0
    prompt = rng.randint(0 if prefix else 1, 3)
    sampled = 0 if rng.random() < 0.1 else rng.randint(1, 5)
    lengths.append(prefix + prompt + sampled)
    shares = [-rng.random() for _ in range(sampled)] if rng.random() < 0.2 else []
    return pb.Turn(
        turn_index=index,
        parent_turn=parent,
        prefix_tokens=prefix,
        prompt_ids=int32_bytes(rng.randrange(9) for _ in range(prompt)),
        temperature=0.0 if rng.random() < 0.1 else 1.0,
        top_p=1.0,
        finish_reason=rng.choice(
            [*[pb.FINISH_REASON_STOP] * 6, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_ABORTED]
        ),
        sampled=pb.SampledTokens(
            ids=int32_bytes(rng.randrange(9) for _ in range(sampled)),
            logprobs=float32_bytes(-rng.random() for _ in range(sampled)),
            weight_versions=int32_bytes([rng.randrange(3)] * sampled),
            allowed_logprobs=float32_bytes(shares),
        ),
    )


def trajectory(rng: Random, name: str, domain: str, *, flat: bool) -> pb.Trajectory:
    lengths: list[int] = []
    turns = [turn(rng, index, lengths) for index in range(rng.randint(1, 4))]
    made = pb.Trajectory(trajectory_id=name, domain=domain, turns=turns)
    if flat or rng.random() < 0.95:
        value = 0.5 if flat else rng.choice([0.0, 0.5, 1.0])
        made.rewards.add(event_id="o", kind=OUTCOME, value=value, turn_index=-1)
    kinds = [] if flat else [PROCESS, PROCESS, AGENT, AGENT]
    for place, kind in enumerate(one for one in kinds if rng.random() < 0.5):
        made.rewards.add(
            event_id=f"{place}",
            kind=kind,
            value=rng.uniform(-2, 2),
            turn_index=rng.randrange(len(turns)),
        )
    if rng.random() < 0.3:
        made.rewards.add(event_id="s", kind=SPEED, value=rng.random(), turn_index=-1)
    return made


def rules(rng: Random) -> CreditRules:
    length = rng.choice([{}, {"max_tokens": 4}, {"max_tokens": 5, "cache_tokens": 3}])
    return CreditRules(
        weights=RewardWeights(
            alpha=0.3, beta=0.2, agent=rng.choice([0.0, 0.5]), gamma=rng.choice([1.0, 0.9])
        ),
        advantages=AdvantageRules(
            baseline=rng.choice(["group_mean", "leave_one_out", "batch_mean", "none"]),
            spread=rng.choice(["none", "group", "batch", "domain"]),
            domain_weights={"code": 2.0},
        ),
        overlong=OverlongRules(
            mask=rng.choice(["none", "turn", "trajectory"]),
            unit=rng.choice(["turn", "trajectory"]),
            penalty=0.5,
            **length,
        ),
        drop_flat_groups=rng.random() < 0.3,
    )


def penalty(tokens: int, own: OverlongRules) -> float:
    if not own.max_tokens:
        return 0.0
    over = tokens - (own.max_tokens - own.cache_tokens)
    share = max(0, over) / own.cache_tokens if own.cache_tokens else float(over > 0)
    return -own.penalty * min(1.0, share)


def returns(one: pb.Trajectory, own: CreditRules) -> list[float]:
    weights, turns = own.weights, len(one.turns)
    lengths = [len(each.sampled.ids) // 4 for each in one.turns]
    if own.overlong.unit == "turn":
        rewards = [penalty(tokens, own.overlong) for tokens in lengths]
    else:
        rewards = [0.0] * (turns - 1) + [penalty(sum(lengths), own.overlong)]
    reported = sum(abs(each.value) for each in one.rewards if each.kind == AGENT)
    scale = {OUTCOME: 1.0, PROCESS: weights.alpha, AGENT: weights.agent / max(1.0, reported)}
    for each in one.rewards:
        rewards[each.turn_index] += scale.get(each.kind, 0.0) * each.value
    return [
        sum(weights.gamma ** (later - at) * rewards[later] for later in range(at, turns))
        for at in range(turns)
    ]


def speeds(group: Group, weights: RewardWeights) -> list[float]:
    given = [[each.value for each in one.rewards if each.kind == SPEED] for one in group]
    known = [sum(values) for values in given if values]
    if len(known) < 2:
        return [0.0] * len(group)
    step = weights.speed_step
    return [
        weights.beta * step * math.trunc((sum(values) - fmean(known)) / step) if values else 0.0
        for values in given
    ]


def deviation(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values))


def divisor(values: Sequence[float], floor: float) -> float:
    spread = deviation(values)
    return max(floor, spread) if spread > 1e-9 else 1.0


def advantages(groups: Sequence[Group], own: CreditRules) -> list[list[list[float]]]:
    """Per group, rollout and turn."""
    credit, gamma = own.advantages, own.weights.gamma
    of_groups = [[returns(one, own) for one in group] for group in groups]
    totals = [[one[0] for one in group] for group in of_groups]
    biases: list[list[float]] = []
    for total in totals:
        others = [total[:at] + total[at + 1 :] or total for at in range(len(total))]
        biases.append(
            {
                "none": [0.0] * len(total),
                "group_mean": [fmean(total)] * len(total),
                "leave_one_out": [fmean(one) for one in others],
                "batch_mean": [fmean(one for each in totals for one in each)] * len(total),
            }[credit.baseline]
        )
    found = []
    for at, group in enumerate(groups):
        domain = group[0].domain
        pool = {
            "none": [],
            "group": totals[at],
            "batch": _differences(totals, biases),
            "domain": _differences(
                *zip(
                    *(
                        (totals[other], biases[other])
                        for other in range(len(groups))
                        if groups[other][0].domain == domain
                    ),
                    strict=True,
                )
            ),
        }[credit.spread]
        scale = divisor(pool, credit.spread_floor) if pool else 1.0
        weight = credit.domain_weights.get(domain, 1.0)
        found.append(
            [
                [
                    weight * ((value - bias) / scale + speed * gamma ** (len(own_T) - 1 - place))
                    for place, value in enumerate(own_T)
                ]
                for own_T, bias, speed in zip(
                    of_groups[at], biases[at], speeds(group, own.weights), strict=True
                )
            ]
        )
    return found


def _differences(
    totals: Sequence[Sequence[float]], biases: Sequence[Sequence[float]]
) -> list[float]:
    return [
        total - bias
        for group, own in zip(totals, biases, strict=True)
        for total, bias in zip(group, own, strict=True)
    ]


def expected_samples(one: pb.Trajectory, credit: list[float], own: CreditRules) -> list[Expected]:
    cut = [each.finish_reason == pb.FINISH_REASON_LENGTH for each in one.turns]
    masked = {"none": [False] * len(cut), "turn": cut, "trajectory": [any(cut)] * len(cut)}
    sequences: list[list[int]] = []
    found = []
    for place, each in enumerate(one.turns):
        before = sequences[each.parent_turn][: each.prefix_tokens] if each.parent_turn >= 0 else []
        context = [*before, *array("i", each.prompt_ids)]
        sequences.append([*context, *array("i", each.sampled.ids)])
        left_out = (
            not context
            or not each.sampled.ids
            or each.temperature == 0
            or each.finish_reason == pb.FINISH_REASON_ABORTED
            or masked[own.overlong.mask][place]
        )
        if left_out:
            continue
        logprobs = array("f", each.sampled.logprobs)
        shares = array("f", each.sampled.allowed_logprobs) or [0.0] * len(logprobs)
        found.append(
            Expected(
                ids=sequences[-1],
                logprobs=[sum(pair) for pair in zip(logprobs, shares, strict=True)],
                advantages=[credit[place] * math.exp(share) for share in shares],
            )
        )
    return found


@pytest.mark.parametrize("seed", range(60))
def test_samples_equal_those_written_out(seed: int) -> None:
    """Their tokens and order, behavior log-probs and advantages; and the batch's statistics."""
    rng = Random(seed)
    own, groups = rules(rng), list[Group]()
    for number in range(rng.randint(1, 4)):
        domain, flat = rng.choice(["code", "qa"]), rng.random() < 0.2
        rollouts = range(rng.randint(1, 5))
        groups.append(
            [trajectory(rng, f"t{number}:{one}:0", domain, flat=flat) for one in rollouts]
        )
    found = build_samples(groups, own)
    totals = [[returns(one, own)[0] for one in group] for group in groups]
    flat_groups = [deviation(group) <= 1e-9 for group in totals]
    expected = [
        sample
        for group, credit, flat in zip(groups, advantages(groups, own), flat_groups, strict=True)
        if not (flat and own.drop_flat_groups)
        for one, credit_T in zip(group, credit, strict=True)
        for sample in expected_samples(one, credit_T, own)
    ]
    assert [int32_array(one.ids).tolist() for one in found.samples] == [one.ids for one in expected]
    for actual, wanted in zip(found.samples, expected, strict=True):
        count = len(wanted.logprobs)
        assert actual.trained == ((len(wanted.ids) - count, len(wanted.ids)),)
        columns = (
            (actual.behavior_logprobs, wanted.logprobs),
            (actual.advantages, wanted.advantages),
        )
        for column, values in columns:
            assert float32_array(column).tolist() == pytest.approx(values, rel=1e-5, abs=1e-6)
    assert found.flat_groups == sum(flat_groups)
    outcomes = [
        sum(each.value for each in one.rewards if each.kind == OUTCOME)
        for group in groups
        for one in group
    ]
    assert found.mean_outcome == pytest.approx(fmean(outcomes))
    assert found.trajectories == len(outcomes)
