"""The batches of `tests.support.trainer.readings`: rules, and trajectories of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from forge.core.credit.advantages import AdvantageRules
from forge.core.credit.rewards import RewardWeights
from forge.rl.config import ObjectiveConfig
from forge.v1 import common_pb2, scheduler_pb2
from services.trainer.samples.credit_rules import CreditRules
from tests.support.pool.records import make_reward, make_turn

PLAIN = CreditRules(weights=RewardWeights())
GSPO = ObjectiveConfig(algorithm="gspo", ratio_level="trajectory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch and its rules."""

    sizes: tuple[int, ...] = (4, 1, 3, 2, 2)
    """Rollouts of each group."""
    rules: CreditRules = PLAIN
    mini_batches: int = 1
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)


CASES = {
    "unequal groups": Case(),
    "one group": Case(sizes=(3,)),
    "mini-batches": Case(mini_batches=2),
    "spread of domains": Case(
        rules=replace(PLAIN, advantages=AdvantageRules(baseline="batch_mean", spread="domain"))
    ),
    "flat groups left out": Case(rules=replace(PLAIN, drop_flat_groups=True)),
    "ratios of trajectories": Case(objective=GSPO),
}


def trajectory(task: str, rollout: int, rng: Random, *, flat: bool) -> common_pb2.Trajectory:
    """Up to three turns below a prompt that the group shares."""
    name = f"{task}:{rollout}:0"
    shared = Random(task)
    prompt = [shared.randrange(13) for _ in range(6)]
    turns, length = [], 0
    for index in range(1 + rollout % 3):
        sampled = [rng.randrange(13) for _ in range(2 + rng.randrange(4))]
        turn = make_turn(
            *(name, index),
            prefix=length,
            prompt=prompt if not index else [rng.randrange(13)],
            sampled=sampled,
            version=1 + rng.randrange(3),
        )
        length += (len(prompt) if not index else 1) + len(sampled)
        turns.append(turn)
    value = 1.0 if flat else rng.random()
    domain = f"d{Random(task).randrange(2)}"
    return common_pb2.Trajectory(
        trajectory_id=name,
        task_id=task,
        domain=domain,
        turns=turns,
        rewards=[make_reward(value=value)],
    )


def groups_of(name: str) -> list[list[common_pb2.Trajectory]]:
    """The groups of a case; the last one is flat."""
    rng, sizes = Random(name), CASES[name].sizes
    return [
        [
            trajectory(f"{name}-{number}", at, rng, flat=0 < number == len(sizes) - 1)
            for at in range(size)
        ]
        for number, size in enumerate(sizes)
    ]


def leased(groups: Sequence[Sequence[common_pb2.Trajectory]]) -> list[scheduler_pb2.BatchGroup]:
    """As the scheduler leases them, each on a pool shard of its own."""
    return [
        scheduler_pb2.BatchGroup(
            group=common_pb2.GroupRecord(
                task=common_pb2.Task(task_id=group[0].task_id), pool_shard=f"s{number}"
            ),
            trajectories=[
                common_pb2.TrajectorySummary(
                    trajectory_id=one.trajectory_id,
                    state=common_pb2.TRAJECTORY_STATE_SEALED,
                    prompt_tokens=sum(len(turn.prompt_ids) // 4 for turn in one.turns),
                    sampled_tokens=sum(len(turn.sampled.ids) // 4 for turn in one.turns),
                )
                for one in group
            ],
        )
        for number, group in enumerate(groups)
    ]
