"""Tasks and data sets as plain data."""

from __future__ import annotations

from typing import cast

import pytest

from forge.client.operator import Operator
from forge.client.stored.pool import PoolReader
from forge.v1 import common_pb2 as pb
from forge.v1 import pool_pb2, scheduler_pb2
from services.console.data import tasks_view
from services.console.data.tasks_view import TasksView, data_set_rows, domain_rows, task_row
from tests.support.console.page import FakeOperator, FakePool
from tests.support.pool.records import make_reward


def group(
    task_id: str, *outcomes: float, index: int = 0, tag: str = "train", phase: str = "trained"
) -> scheduler_pb2.BatchGroup:
    """A group of domain code with a trajectory for each outcome."""
    purpose = pb.PURPOSE_EVAL if tag.startswith("eval") else pb.PURPOSE_TRAIN
    task = pb.Task(task_id=task_id, domain="code", scaffold="s", tag=tag, purpose=purpose)
    return scheduler_pb2.BatchGroup(
        group=pb.GroupRecord(task=task, queue_index=index),
        phase=phase,
        trajectories=[
            pb.TrajectorySummary(
                rewards=[make_reward(value=one), make_reward("p", kind=pb.REWARD_KIND_PROCESS)]
            )
            for one in outcomes
        ],
    )


def test_data_set_has_rows_epochs_and_rewards() -> None:
    """Of a file, by the ids of its tasks; held-out ones apart, the newest set last."""
    rows = data_set_rows(
        [
            group("math.e0.r0", 1.0, 0.0, tag="math", index=4),
            group("math.e1.r0", 1.0, tag="math", index=9, phase="running"),
            group("math.e0.r1", tag="math", index=5, phase="queued"),
            group("eval-1", 0.5, tag="eval-s1", index=7, phase="evaluated"),
            group("by-hand", tag=""),
        ]
    )
    assert [(one["tag"], one["held_out"]) for one in rows] == [
        ("", False),
        ("eval-s1", True),
        ("math", False),
    ]
    by_hand, _, math = rows
    assert (by_hand["rows"], by_hand["epochs"], by_hand["mean_outcome"]) == (None, None, None)
    assert (math["groups"], math["rows"], math["epochs"], math["rollouts"]) == (3, 2, 2, 3)
    assert math["phases"] == {"trained": 1, "running": 1, "queued": 1}
    assert math["mean_outcome"] == 2 / 3


def test_domain_has_the_counts_of_all_shards() -> None:
    """Training and held-out groups apart; open trajectories have no domain yet."""
    count = pool_pb2.GetPoolStatsResponse.GroupCount
    part = pool_pb2.GetPoolStatsResponse.TrajectoryCount
    shard = pool_pb2.GetPoolStatsResponse(
        group_counts=[
            count(domain="code", purpose=pb.PURPOSE_TRAIN, state=pb.GROUP_STATE_TRAINED, groups=3),
            count(domain="code", purpose=pb.PURPOSE_EVAL, state=pb.GROUP_STATE_EVALUATED, groups=2),
        ],
        trajectory_counts=[
            part(state=pb.TRAJECTORY_STATE_OPEN, trajectories=9),
            part(
                domain="code",
                state=pb.TRAJECTORY_STATE_SEALED,
                trajectories=4,
                turns=8,
                sampled_tokens=16,
            ),
        ],
    )
    status = scheduler_pb2.GetSchedulerStatusResponse(
        domains=[scheduler_pb2.DomainStatus(domain="qa", share=0.5)]
    )
    code, qa = domain_rows(status, [shard, shard])
    assert (code["domain"], code["groups"], code["held_out_groups"]) == ("code", {"trained": 6}, 4)
    assert (code["sealed"], code["turns"], code["sampled_tokens"]) == (8, 16, 32)
    assert (qa["domain"], qa["share"], qa["recent_reward"]) == ("qa", 0.5, None)


def test_task_has_the_outcome_of_each_rollout() -> None:
    """Other rewards are no outcomes."""
    row = task_row(group("a", 1.0, 0.0))
    assert (row["outcomes"], row["mean_outcome"], row["rollouts"]) == ([1.0, 0.0], 0.5, 2)


async def test_page_has_the_newest_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a data set, and of all: beyond a bound the page says that there are more."""
    monkeypatch.setattr(tasks_view, "MOST_TASKS", 2)
    monkeypatch.setattr(tasks_view, "MOST_GROUPS", 4)
    operator = FakeOperator()
    view = TasksView(cast(Operator, operator), cast(PoolReader, FakePool()))
    operator.listed = [group(f"t{place}", tag="a", index=place) for place in range(3)]
    page = await view.data_set("a")
    assert ([one["task_id"] for one in page["tasks"]], page["complete"]) == (["t2", "t1"], False)
    assert [one["groups"] for one in (await view.read())["data_sets"]] == [3]
    operator.listed += [group("u", tag="b", index=3), group("v", tag="", index=4)]
    found = await view.read()
    assert {one["tag"]: one["groups"] for one in found["data_sets"]} == {"a": 2, "b": 1, "": 1}
    assert not found["complete"]
    page = await view.data_set("")
    assert ([one["task_id"] for one in page["tasks"]], page["complete"]) == (["v"], False)
    page = await view.data_set("b")
    assert ([one["task_id"] for one in page["tasks"]], page["complete"]) == (["u"], True)
