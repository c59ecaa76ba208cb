"""What becomes of a group when the pool has lost a trajectory of it."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import DataLoss, InvalidArgument
from forge.runtime.coordination import Coordinator, Discovery, Leadership
from forge.runtime.rpc.remote import Remote
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerServicer
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.state.messages.batches import ReleaseBatch
from services.scheduler.state.messages.groups import Submit, ViewGroups
from services.scheduler.state.messages.rollouts import AttemptReport, LeaseRollouts, SettleRollouts
from services.scheduler.state.messages.term import GetStatus
from tests.support.runtime.unused import unused
from tests.support.scheduler.cluster import make_task
from tests.support.scheduler.term import ASK_S, FakeShards, TermActors


@pytest.fixture
def servicer(term: TermActors) -> SchedulerServicer:
    """The calls of a leader, around the actors of its term."""
    servicer = SchedulerServicer(
        SchedulerConfig(etcd="etcd:2379"), unused(Keyring), unused(Discovery), unused(Coordinator)
    )
    servicer.leader = term.leader()
    return servicer


async def complete(term: TermActors, *task_ids: str) -> None:
    """Groups of one rollout each, sealed."""
    tasks = {task_id: make_task(task_id) for task_id in task_ids}
    await term.submissions.ask(Submit(tasks=tasks), timeout_s=ASK_S)
    ask = LeaseRollouts(runner_id="r", max_rollouts=len(task_ids))
    grants = await (await term.queue.ask(ask, timeout_s=ASK_S))
    for grant in grants:
        term.shards.seal(grant.trajectory_id)
    reports = [
        AttemptReport(trajectory_id=g.trajectory_id, summary=term.shards.stored[g.trajectory_id])
        for g in grants
    ]
    await term.queue.ask(SettleRollouts(reports=reports), timeout_s=ASK_S)


async def lease_batch(servicer: SchedulerServicer) -> scheduler_pb2.LeaseBatchResponse:
    request = scheduler_pb2.LeaseBatchRequest(trainer_id="t", max_groups=3)
    return await servicer.LeaseBatch(request, None)


async def test_group_with_a_lost_trajectory_is_tombstoned(
    term: TermActors, shards: FakeShards, servicer: SchedulerServicer
) -> None:
    """Lost, or back in an earlier state: its group gets a tombstone with the reason, and the next
    batch has the others."""
    await complete(term, "a", "b", "c")
    del shards.stored["a:0:0"]
    shards.stored["b:0:0"].state = common_pb2.TRAJECTORY_STATE_OPEN
    assert not (await lease_batch(servicer)).batch_id
    (group,) = (await lease_batch(servicer)).groups
    assert group.group.task.task_id == "c"
    (view,) = await term.queue.ask(ViewGroups(task_ids=["a"]), timeout_s=ASK_S)
    assert view.record.state == common_pb2.GROUP_STATE_TOMBSTONED
    assert view.record.reason == f"pool shard {view.record.pool_shard} has lost a:0:0"
    status = await term.queue.ask(GetStatus(), timeout_s=ASK_S)
    assert (status.tombstoned, status.pending) == (2, 1)
    tombstoned = common_pb2.GROUP_STATE_TOMBSTONED
    assert shards.states() == {"a": tombstoned, "b": tombstoned}


async def test_late_report_of_a_loss_changes_no_other_batch(
    term: TermActors, servicer: SchedulerServicer
) -> None:
    """Two calls of one trainer report the same loss; the second finds no group to tombstone."""
    await complete(term, "a", "b")
    batch_id = (await lease_batch(servicer)).batch_id
    loss = ReleaseBatch(batch_id=batch_id, reasons={"a": "lost"})
    await term.commits.ask(loss, timeout_s=ASK_S)
    batch = await lease_batch(servicer)
    assert [group.group.task.task_id for group in batch.groups] == ["b"]
    for task_id in ("a", "b"):
        late = ReleaseBatch(batch_id=batch_id, reasons={task_id: "lost"})
        await term.commits.ask(late, timeout_s=ASK_S)
    request = scheduler_pb2.CommitBatchRequest(batch_id=batch.batch_id, step=1, task_ids=["b"])
    await servicer.CommitBatch(request, None)
    status = await term.queue.ask(GetStatus(), timeout_s=ASK_S)
    assert (status.trained, status.tombstoned) == (1, 1)


async def test_trainer_tombstones_groups_of_its_batch(
    term: TermActors, shards: FakeShards, servicer: SchedulerServicer
) -> None:
    """Those it names, and only groups of the batch; the others are leased again."""
    await complete(term, "a", "b")
    batch = await lease_batch(servicer)
    release = scheduler_pb2.ReleaseBatchRequest(
        batch_id=batch.batch_id, reason="data loss", task_ids=["a", "another"]
    )
    for _ in range(2):
        await servicer.ReleaseBatch(release, None)
    assert shards.states() == {"a": common_pb2.GROUP_STATE_TOMBSTONED}
    (group,) = (await lease_batch(servicer)).groups
    assert group.group.task.task_id == "b"


async def test_listing_omits_lost_trajectories(
    term: TermActors, shards: FakeShards, servicer: SchedulerServicer
) -> None:
    """An operator sees the other groups, and the rest of the damaged one."""
    await complete(term, "a", "b")
    del shards.stored["a:0:0"]
    listing = servicer.ListGroups(scheduler_pb2.ListGroupsRequest(), None)
    sizes = {one.group.group.task.task_id: len(one.group.trajectories) async for one in listing}
    assert sizes == {"a": 0, "b": 1}


def shards_of(pool: Remote[Any]) -> PoolShards:
    return PoolShards(unused(Discovery), pool, unused(Leadership), timeout_s=1.0)


class DamagedPool(Remote[Any]):
    """A remote of one shard in which some summaries cannot be read."""

    def __init__(self, *damaged: str) -> None:
        self._damaged = set(damaged)

    async def call(self, method: str, request: Any, **_: Any) -> pool_pb2.GetSummariesResponse:
        if self._damaged.intersection(request.trajectory_ids):
            raise DataLoss("the checksum of a record does not match")
        found = [common_pb2.TrajectorySummary(trajectory_id=i) for i in request.trajectory_ids]
        return pool_pb2.GetSummariesResponse(summaries=found)


async def test_damaged_summary_hides_no_other() -> None:
    """The pool refuses a whole request for one record: the others are found all the same."""
    ids = [f"a:{n}:0" for n in range(9)]
    shards = shards_of(DamagedPool("a:3:0", "a:8:0"))
    found = await shards.summaries({"s0": ids})
    assert list(found) == [each for each in ids if each not in ("a:3:0", "a:8:0")]


class WordyPool(Remote[Any]):
    """A remote of one shard whose answers hold three summaries at most."""

    def __init__(self) -> None: ...

    async def call(self, method: str, request: Any, **_: Any) -> pool_pb2.GetSummariesResponse:
        if len(request.trajectory_ids) > 3:
            raise InvalidArgument("an answer of 5242880 bytes: one message holds 4259840")
        found = [common_pb2.TrajectorySummary(trajectory_id=i) for i in request.trajectory_ids]
        return pool_pb2.GetSummariesResponse(summaries=found)


async def test_summaries_beyond_one_message_are_fetched_in_several() -> None:
    """Each has the rewards of its trajectory, of unknown number."""
    ids = [f"a:{n}:0" for n in range(9)]
    shards = shards_of(WordyPool())
    assert list(await shards.summaries({"s0": ids})) == ids
