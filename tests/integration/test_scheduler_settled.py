"""Groups that were settled long ago, and leaders that never read them. Real processes."""

from __future__ import annotations

import pytest

from forge.client.operator import Operator
from forge.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from forge.v1 import scheduler_pb2
from tests.support.scheduler.cluster import (
    START_S,
    SchedulerCluster,
    SchedulerProcess,
    assert_counts_balance,
    make_task,
)

STEPS = 6
BATCH = 2
HELD_GROUPS = "2"
"""One of each of two shards, or the groups of a step."""


def returned(process: SchedulerProcess) -> int:
    """Groups that the shards returned to it at its election."""
    return sum(int(entry["groups_read"]) for entry in process.logged("pool_shard_registered"))


async def train(forge: SchedulerCluster) -> list[scheduler_pb2.LeaseBatchResponse]:
    """Trains tasks t0, t1, ..., two a step; every third has a tag. Returns the batches."""
    await forge.submit(
        make_task(f"t{n}", tag="third" if n % 3 == 0 else "") for n in range(STEPS * BATCH)
    )
    batches = []
    for step in range(1, STEPS + 1):
        await forge.complete(BATCH)
        batches.append(await forge.take())
        await forge.commit(batches[-1], step)
    return batches


async def test_new_leader_knows_groups_that_it_never_read(forge: SchedulerCluster) -> None:
    """Of two shards it reads the last steps; calls for the other groups are answered as before, and
    a rewind restores them."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    first = forge.start_scheduler(held_settled_groups=HELD_GROUPS)
    await first.until_logged("term_began")
    (oldest, *_) = await train(forge)
    before = await forge.status()
    listed = sorted(one.group.task.task_id for one in await forge.groups("third"))
    await forge.kill(first)
    second = forge.start_scheduler(held_settled_groups=HELD_GROUPS)
    await second.until_logged("term_began")

    assert returned(second) <= 2 * BATCH
    after = await forge.status()
    assert (after.accepted, after.trained, after.head) == (12, 12, 12)
    assert after.domains == before.domains
    assert_counts_balance(after)
    assert await forge.submit([make_task("t1"), make_task("t11")]) == 0
    with pytest.raises(InvalidArgument, match="'t1' was submitted before with different content"):
        await forge.submit([make_task("t1", domain="qa")])
    await forge.commit(oldest, 1)
    await forge.commit(oldest, 1, name_groups=False)
    with pytest.raises(FailedPrecondition, match="committed by step 1"):
        await forge.commit(oldest, 2)
    reports = [scheduler_pb2.FinishRolloutsRequest.Outcome(trajectory_id="t0:0:0")]
    await forge.ask("FinishRollouts", scheduler_pb2.FinishRolloutsRequest(outcomes=reports))
    reports[0].trajectory_id = "other:0:0"
    answer = await forge.ask(
        "FinishRollouts", scheduler_pb2.FinishRolloutsRequest(outcomes=reports)
    )
    assert [refusal.trajectory_id for refusal in answer.refused] == ["other:0:0"]
    assert sorted(one.group.task.task_id for one in await forge.groups("third")) == listed
    assert len(await forge.groups()) == 12
    operator = Operator(forge.coordinator, forge.channels)
    newest, complete = await operator.newest_groups("", most=5)
    assert [one.group.task.task_id for one in newest] == [f"t{n}" for n in range(7, 12)]
    assert not complete and all(one.trajectories for one in newest)
    assert (await operator.newest_groups("third", most=4))[1]

    request = scheduler_pb2.RewindRequest(step=1)
    assert (await forge.ask("Rewind", request)).groups == 10
    rewound = await forge.status()
    assert (rewound.accepted, rewound.trained, rewound.pending) == (12, 2, 10)
    assert rewound.head == 2
    await forge.commit(await forge.take(), 2)
    assert (await forge.status()).trained == 4


async def test_new_task_waits_for_a_shard_with_groups_that_are_not_held(
    forge: SchedulerCluster,
) -> None:
    """The shard may have it already. Held groups, and those of the other shard, are known."""
    forge.start_pool("s1")
    await forge.coordinator.discover("pool").wait(count=2, timeout_s=START_S)
    leader = forge.start_scheduler(held_settled_groups=HELD_GROUPS)
    await leader.until_logged("term_began")
    await train(forge)
    where = {one.group.task.task_id: one.group.pool_shard for one in await forge.groups()}
    there = [task_id for task_id, shard in where.items() if shard == "s0"]
    tasks = {f"t{n}": make_task(f"t{n}", tag="third" if n % 3 == 0 else "") for n in range(12)}
    await forge.kill(forge.pools["s1"])
    assert await forge.submit(tasks[task_id] for task_id in there) == 0
    request = scheduler_pb2.SubmitTasksRequest(tasks=[make_task("new")])
    with pytest.raises(Unavailable, match="pool shard s1"):
        await forge.ask("SubmitTasks", request, retry_for_s=0.0)
    forge.start_pool("s1")
    assert await forge.submit([make_task("new")]) == 1
