"""A batch that several data groups read, with readers that share this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from forge.core.credit.rewards import RewardWeights
from forge.core.errors import InvalidArgument, Unavailable
from forge.v1 import common_pb2, scheduler_pb2
from services.trainer.batches.divided_reading import (
    DividedReading,
    ReadingSettings,
    assigned,
    tokens_of,
)
from services.trainer.batches.read_orders import (
    PlanGroups,
    PlanSettings,
    ReadAnswer,
    ReadGroups,
    ReadOrder,
)
from services.trainer.batches.reading import ReadBatch, ReadersLost
from services.trainer.batches.trajectory_fetch import Unreadable
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.group_facts import read_group
from services.trainer.samples.samples import build_samples
from tests.support.pool.records import make_reward, make_turn

RULES = CreditRules(weights=RewardWeights(), drop_flat_groups=True)


class Ranks:
    """Data groups whose readers have every trajectory; errors are answered once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.orders: list[Sequence[ReadOrder]] = []
        self.faults: list[tuple[int, ReadAnswer]] = []

    async def exchange(self, orders: Sequence[ReadOrder]) -> Sequence[ReadAnswer]:
        self.orders.append(orders)
        answers = [self._answer(order) for order in orders]
        if self.faults:
            group, fault = self.faults.pop(0)
            answers[group] = fault
        return answers

    def _answer(self, order: ReadOrder) -> ReadAnswer:
        if isinstance(order, PlanGroups):
            return ReadAnswer(plan_s=float(len(order.groups)))
        facts = {
            one.number: read_group(
                [trajectory(name) for name in one.trajectory_ids], order.rules, {}
            ).facts
            for one in order.groups
        }
        return ReadAnswer(facts=facts)

    def read(self, call: int) -> list[list[int]]:
        """Numbers of the groups that each data group was asked to read."""
        orders = self.orders[call]
        return [
            [one.number for one in order.groups] if isinstance(order, ReadGroups) else []
            for order in orders
        ]


def trajectory(name: str) -> common_pb2.Trajectory:
    """The first rollout of a task is better than the others, unless the task is flat."""
    better = ":0:" in name and "flat" not in name
    return common_pb2.Trajectory(
        trajectory_id=name,
        domain="code",
        turns=[make_turn(name)],
        rewards=[make_reward(value=float(better))],
    )


def group(task: str, *, tokens: int) -> scheduler_pb2.BatchGroup:
    """Two sealed rollouts, and one that was abandoned."""
    sealed, abandoned = (
        common_pb2.TRAJECTORY_STATE_SEALED,
        common_pb2.TRAJECTORY_STATE_ABANDONED,
    )
    return scheduler_pb2.BatchGroup(
        group=common_pb2.GroupRecord(task=common_pb2.Task(task_id=task), pool_shard="s0"),
        trajectories=[
            common_pb2.TrajectorySummary(
                trajectory_id=f"{task}:{at}:0",
                state=state,
                prompt_tokens=tokens - 1,
                sampled_tokens=1,
            )
            for at, state in enumerate((sealed, sealed, abandoned))
        ],
    )


def reading(ranks: Ranks, *, mini_batches: int = 1, patience_s: float = 0.0) -> DividedReading:
    async def addresses(shard: str) -> tuple[str, ...]:
        return (f"{shard}:1",)

    plan = PlanSettings(token_budget=64, channels=16, relay=True, route_shape=None)
    settings = ReadingSettings(
        rules=RULES, plan=plan, mini_batches=mini_batches, patience_s=patience_s
    )
    return DividedReading(ranks, addresses, settings=settings)


def test_largest_groups_are_assigned_first_to_the_least_loaded() -> None:
    """Tokens of earlier leases of the batch count; groups of unknown size count as one token."""
    loads = [0, 0, 0]
    assert assigned([5, 40, 10, 30], loads) == [2, 0, 2, 1] and loads == [40, 30, 15]
    assert assigned([3, 3], loads) == [2, 2] and loads == [40, 30, 21]
    unknown = [0, 0]
    assert assigned([0, 0, 0], unknown) == [0, 1, 0] and unknown == [2, 1]
    assert tokens_of(group("a", tokens=7)) == 14


async def test_batch_is_that_of_one_reader() -> None:
    """Statistics, numbers and credit, with a refill; more data groups than rollout groups."""
    ranks = Ranks(4)
    draft = reading(ranks).begin({})
    await draft.add([group("a", tokens=3), group("flat", tokens=9)])
    assert (await draft.samples()).flat_groups == 1
    await draft.add([group("b", tokens=5)])
    batch = await draft.samples()
    names = [[f"{task}:{at}:0" for at in (0, 1)] for task in ("a", "flat", "b")]
    expected = build_samples([[trajectory(one) for one in each] for each in names], RULES)
    assert replace(batch, samples=expected.samples) == expected
    assert ranks.read(0) == [[2], [1], [], []] and ranks.read(1) == [[], [], [3], []]
    planned = await draft.planned()
    assert planned.plan == ReadBatch(number=1, plan_s=1.0)
    (orders,) = ranks.orders[2:]
    credits = [one for order in orders if isinstance(order, PlanGroups) for one in order.groups]
    assert [(one.number, one.credit.trained) for one in credits] == [
        (2, False),
        (1, True),
        (3, True),
    ]
    assert [one.credit.first_sample for one in credits] == [2, 0, 2]
    assert [one.credit.first_trajectory for one in credits] == [2, 0, 4]


async def test_mini_batches_have_whole_groups_of_every_data_group() -> None:
    """Every data group plans the same number of updates, flat groups in none of them."""
    ranks = Ranks(2)
    draft = reading(ranks, mini_batches=2).begin({})
    await draft.add([group(task, tokens=4) for task in ("a", "b", "flat")])
    await draft.samples()
    await draft.planned()
    orders: Any = ranks.orders[-1]
    assert [order.updates for order in orders] == [2, 2]
    updates = {one.number: one.update for order in orders for one in order.groups}
    assert {updates[1], updates[2]} == {0, 1}


async def test_unreadable_group_adds_nothing() -> None:
    """The batch is that of the groups before; the numbers of the next lease are new."""
    ranks = Ranks(2)
    ranks.faults = [(1, ReadAnswer(lost={"b:0:0": "erased"}))]
    draft = reading(ranks).begin({})
    with pytest.raises(Unreadable, match="erased"):
        await draft.add([group("a", tokens=3), group("b", tokens=3)])
    assert draft.groups == 0
    await draft.add([group("c", tokens=3)])
    assert draft.groups == 1 and ranks.read(1) == [[3], []]


async def test_failed_read_is_repeated_within_the_patience() -> None:
    """With the addresses of now; then its error names the data group."""
    away = ReadAnswer(error=("Unavailable", "no route"))
    ranks = Ranks(2)
    ranks.faults = [(1, away)]
    draft = reading(ranks, patience_s=60.0).begin({})
    await draft.add([group("a", tokens=3)])
    assert draft.groups == 1 and len(ranks.orders) == 2
    ranks.faults = [(1, away)]
    with pytest.raises(Unavailable, match="data group 1: no route"):
        await reading(ranks, patience_s=-1.0).begin({}).add([group("a", tokens=3)])


async def test_error_that_no_retry_mends_is_raised_at_once() -> None:
    """Of a malformed sample; and a lost rank."""
    ranks = Ranks(2)
    draft = reading(ranks, patience_s=60.0).begin({})
    await draft.add([group("a", tokens=3)])
    await draft.samples()
    ranks.faults = [(0, ReadAnswer(error=("InvalidArgument", "ids has 3 bytes")))]
    with pytest.raises(InvalidArgument, match="data group 0: ids"):
        await draft.planned()
    assert not ReadersLost("gone").retryable
