"""Batches are claimed, kept, fetched and prepared one ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from forge.core.credit.rewards import RewardWeights
from forge.core.errors import DataLoss, ForgeError, NotFound
from forge.rl.learner.batch_plan import BatchPlan
from forge.runtime.rpc.chunks import split
from forge.runtime.rpc.remote import Remote
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from forge.v1.pool_pb2_grpc import PoolServiceStub
from forge.v1.scheduler_pb2_grpc import SchedulerServiceStub
from services.trainer.batches import trajectory_fetch
from services.trainer.batches.batch_source import BatchSource, SourceSettings
from services.trainer.batches.reading import LocalReading
from services.trainer.batches.trajectory_fetch import TrajectoryFetch, shard_in
from services.trainer.samples.credit_rules import CreditRules
from tests.support.pool.records import make_reward, make_turn

RULES = CreditRules(weights=RewardWeights())


class FakeScheduler(Remote[SchedulerServiceStub]):
    """Hands out batches the way the scheduler does: one per name at a time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.held: dict[str, str] = {}
        self.available = asyncio.Semaphore(0)
        self.renewed = asyncio.Event()
        self.renewal_fault: ForgeError | None = None
        self.lease_s = 60.0
        self.groups_per_batch = 1
        self._issued = 0

    async def call(self, method: str, request: Any, **_: Any) -> Any:
        self.calls.append((method, request))
        return await getattr(self, f"_{method}")(request)

    def asked(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    async def _LeaseBatch(
        self, request: scheduler_pb2.LeaseBatchRequest
    ) -> scheduler_pb2.LeaseBatchResponse:
        if request.trainer_id not in self.held:
            if not request.wait_s and self.available.locked():
                return scheduler_pb2.LeaseBatchResponse()
            await self.available.acquire()
            self.held[request.trainer_id] = f"batch-{self._issued}"
            self._issued += 1
        batch_id = self.held[request.trainer_id]
        return scheduler_pb2.LeaseBatchResponse(
            batch_id=batch_id,
            lease_s=self.lease_s,
            groups=[
                group(batch_id, number)
                for number in range(min(self.groups_per_batch, request.max_groups))
            ],
        )

    async def _RenewBatch(self, _: Any) -> None:
        self.renewed.set()
        if self.renewal_fault is not None:
            raise self.renewal_fault

    async def _CommitBatch(self, request: Any) -> None:
        self._let_go(request.batch_id)

    async def _ReleaseBatch(self, request: Any) -> None:
        self._let_go(request.batch_id)

    async def _Rewind(self, _: Any) -> scheduler_pb2.RewindResponse:
        self.held.clear()
        return scheduler_pb2.RewindResponse()

    def _let_go(self, batch_id: str) -> None:
        self.held = {name: held for name, held in self.held.items() if held != batch_id}


def group(batch_id: str, number: int) -> scheduler_pb2.BatchGroup:
    """Two rollouts that are sealed and one that was abandoned."""
    task_id = f"{batch_id}-task-{number}" if number else f"{batch_id}-task"
    states = (
        common_pb2.TRAJECTORY_STATE_SEALED,
        common_pb2.TRAJECTORY_STATE_ABANDONED,
        common_pb2.TRAJECTORY_STATE_SEALED,
    )
    return scheduler_pb2.BatchGroup(
        group=common_pb2.GroupRecord(task=common_pb2.Task(task_id=task_id), pool_shard="s0"),
        trajectories=[
            common_pb2.TrajectorySummary(trajectory_id=f"{task_id}:{n}:0", state=state)
            for n, state in enumerate(states)
        ],
    )


class FakePool(Remote[PoolServiceStub]):
    """Streams trajectories; a fault cuts the stream after the first, a damaged one before it."""

    def __init__(self) -> None:
        self.fault: ForgeError | None = None
        self.damaged: set[str] = set()
        self.better: set[str] = set()
        """Trajectories with a better outcome than the others."""
        self.silent_after_first = False
        self.fetched: list[list[str]] = []

    async def pick(self, **_: Any) -> tuple[Any, Any]:
        return None, self

    async def FetchTrajectories(
        self, request: pool_pb2.FetchTrajectoriesRequest
    ) -> AsyncIterator[pool_pb2.FetchTrajectoriesResponse]:
        self.fetched.append(list(request.trajectory_ids))
        for trajectory_id in request.trajectory_ids:
            if trajectory_id in self.damaged:
                raise DataLoss(f"checksum of {trajectory_id}")
            trajectory = common_pb2.Trajectory(
                trajectory_id=trajectory_id,
                domain="code",
                turns=[make_turn(trajectory_id)],
                rewards=[make_reward()],
            )
            if trajectory_id in self.better:
                trajectory.rewards[0].value += 1
            for chunk in split(trajectory.SerializeToString()):
                yield pool_pb2.FetchTrajectoriesResponse(
                    trajectory_id=trajectory_id, trajectory=chunk
                )
            if self.silent_after_first:
                self.silent_after_first = False
                await asyncio.Event().wait()
            fault, self.fault = self.fault, None
            if fault is not None:
                raise fault


class Cluster:
    """A source with what it talks to."""

    def __init__(self, *, refill_groups: int = 0) -> None:
        self.scheduler: Any = FakeScheduler()
        self.pool: Any = FakePool()
        self.baselines_s: dict[str, float] = {}
        reading = LocalReading(
            fetch=TrajectoryFetch(shard_in(self.pool), patience_s=60.0),
            plan=lambda samples: BatchPlan(trees=(), plan_s=float(len(samples))),
            rules=replace(RULES, drop_flat_groups=refill_groups > 0),
        )
        self.source = BatchSource(
            self.scheduler,
            reading,
            baselines_s=lambda: self.baselines_s,
            settings=SourceSettings(
                trainer_id="trainer",
                max_groups=3,
                patience_s=60.0,
                refill_groups=refill_groups,
            ),
        )


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    yield made
    await made.source.drop()


async def test_batch_has_the_sealed_trajectories_of_its_groups(cluster: Cluster) -> None:
    """Abandoned rollouts are not fetched."""
    cluster.scheduler.available.release()
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None
    assert batch.claim.task_ids == ("batch-0-task",)
    assert cluster.pool.fetched == [["batch-0-task:0:0", "batch-0-task:2:0"]]
    assert batch.samples.trajectories == 2 and batch.plan.plan_s == 2.0
    assert cluster.scheduler.asked("LeaseBatch")[0].max_groups == 3


async def test_batch_has_the_baselines_of_its_start(cluster: Cluster) -> None:
    """However long it waits, so its speeds do not depend on the wait."""
    cluster.baselines_s = {"code": 4.0}
    preparing = cluster.source.prepare()
    cluster.baselines_s = {"code": 9.0}
    cluster.scheduler.available.release()
    assert (await preparing).samples.baselines_s == {"code": 4.0}


async def test_source_without_a_batch_returns_none(cluster: Cluster) -> None:
    """And the pending lease request is not repeated."""
    assert await cluster.source.take_batch(wait_s=0) is None
    assert await cluster.source.take_batch(wait_s=0) is None
    assert len(cluster.scheduler.asked("LeaseBatch")) <= 1


async def test_next_batch_is_prepared_while_one_is_held(cluster: Cluster) -> None:
    """Under another trainer name: the same name would get the same batch."""
    cluster.scheduler.available.release()
    cluster.scheduler.available.release()
    first = await cluster.source.take_batch(wait_s=30)
    await cluster.source.prepare()
    assert first is not None
    assert set(cluster.scheduler.held.values()) == {"batch-0", "batch-1"}
    await cluster.source.commit(first.claim, step=1)
    second = await cluster.source.take_batch(wait_s=30)
    assert second is not None and second.claim.batch_id == "batch-1"
    (commit,) = cluster.scheduler.asked("CommitBatch")
    assert (commit.batch_id, commit.step, list(commit.task_ids)) == (
        "batch-0",
        1,
        ["batch-0-task"],
    )


async def test_batch_lease_is_renewed_until_it_is_settled(cluster: Cluster) -> None:
    """While the learner computes, the lease is kept; after the commit it ends."""
    cluster.scheduler.lease_s = 0.003
    cluster.scheduler.available.release()
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None
    async with asyncio.timeout(30):
        await cluster.scheduler.renewed.wait()
    await cluster.source.commit(batch.claim, step=1)
    await asyncio.wait({batch.claim.renewal})
    assert batch.claim.renewal.cancelled()


async def test_lost_batch_lease_is_left_to_the_commit(cluster: Cluster) -> None:
    """A new leader does not know it: renewal ends, training continues."""
    cluster.scheduler.lease_s = 0.003
    cluster.scheduler.renewal_fault = NotFound("not held")
    cluster.scheduler.available.release()
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None
    async with asyncio.timeout(30):
        await batch.claim.renewal
    await cluster.source.commit(batch.claim, step=1)


async def test_interrupted_stream_is_continued(cluster: Cluster) -> None:
    """Received trajectories are not fetched again."""
    cluster.pool.fault = ForgeError("cut")
    cluster.pool.fault.retryable = True
    cluster.scheduler.available.release()
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None and batch.samples.trajectories == 2
    assert cluster.pool.fetched[1] == ["batch-0-task:2:0"]


async def test_silent_stream_is_ended(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that stops in the middle gets another request for the rest, without a deadline for
    all."""
    monkeypatch.setattr(trajectory_fetch, "_SILENCE_S", 0.05)
    cluster.pool.silent_after_first = True
    cluster.scheduler.available.release()
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None and batch.samples.trajectories == 2
    assert cluster.pool.fetched[1] == ["batch-0-task:2:0"]


async def test_groups_with_an_unreadable_trajectory_are_tombstoned(cluster: Cluster) -> None:
    """Only they, with the reason: the others return, and the next batch takes their place."""
    cluster.scheduler.groups_per_batch = 3
    cluster.pool.damaged = {"batch-0-task-1:2:0"}
    cluster.scheduler.available.release()
    cluster.scheduler.available.release()
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None and batch.claim.batch_id == "batch-1"
    (release,) = cluster.scheduler.asked("ReleaseBatch")
    assert (release.batch_id, release.reason, list(release.task_ids)) == (
        "batch-0",
        "data loss: checksum of batch-0-task-1:2:0",
        ["batch-0-task-1"],
    )
    # What had been read is not read again to find it.
    assert sum(ids.count("batch-0-task:0:0") for ids in cluster.pool.fetched) == 1


async def test_unused_prepared_batch_is_released(cluster: Cluster) -> None:
    """At the end of a run its groups return into the window, without a tombstone."""
    cluster.scheduler.available.release()
    await cluster.source.prepare()
    await cluster.source.release()
    (release,) = cluster.scheduler.asked("ReleaseBatch")
    assert (release.batch_id, release.reason) == ("batch-0", "")


async def test_rewind_drops_the_prepared_batch(cluster: Cluster) -> None:
    """The scheduler ended every lease; the next batch is leased again."""
    cluster.scheduler.available.release()
    await cluster.source.prepare()
    await cluster.source.rewind(4, fence=1)
    (rewind,) = cluster.scheduler.asked("Rewind")
    assert rewind.step == 4
    cluster.scheduler.available.release()
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None and batch.claim.batch_id == "batch-1"


async def refilled(*, refill_groups: int, batches: int, informative: list[str]) -> Cluster:
    """A source whose scheduler has so many batches of three groups; of all groups only the
    `informative` ones have unequal rewards."""
    cluster = Cluster(refill_groups=refill_groups)
    cluster.scheduler.groups_per_batch = 3
    cluster.pool.better = {f"{task_id}:0:0" for task_id in informative}
    for _ in range(batches):
        cluster.scheduler.available.release()
    return cluster


async def test_flat_groups_are_replaced_by_further_groups() -> None:
    """As many as are missing, until the batch has its number of informative groups; all of them
    are committed with the step."""
    informative = ["batch-0-task-1", "batch-1-task", "batch-2-task"]
    cluster = await refilled(refill_groups=9, batches=5, informative=informative)
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None
    asked = cluster.scheduler.asked("LeaseBatch")
    assert [(one.trainer_id, one.max_groups) for one in asked] == [
        ("trainer#0", 3),
        ("trainer#0.1", 2),
        ("trainer#0.2", 1),
    ]
    # A new leader must not lease groups of the same batch again.
    assert [[held.batch_id for held in one.held] for one in asked][2] == ["batch-0", "batch-1"]
    found = batch.samples
    assert (found.groups, found.flat_groups, found.refill_groups) == (6, 3, 3)
    assert found.trajectories == 12 and len(found.samples) == 6
    for claim in batch.claims:
        await cluster.source.commit(claim, step=4)
    commits = cluster.scheduler.asked("CommitBatch")
    assert [(one.batch_id, one.step) for one in commits] == [
        ("batch-0", 4),
        ("batch-1", 4),
        ("batch-2", 4),
    ]
    assert batch.task_ids == tuple(task for one in commits for task in one.task_ids)


async def test_refill_is_bounded() -> None:
    """By the number of further groups."""
    cluster = await refilled(refill_groups=2, batches=5, informative=["batch-0-task"])
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None and len(batch.claims) == 2
    assert (batch.samples.groups, batch.samples.refill_groups) == (5, 2)


async def test_batch_without_further_groups_is_trained_as_it_is() -> None:
    """After its longest wait, here none; a batch of informative groups does not ask at all."""
    cluster = await refilled(refill_groups=9, batches=1, informative=["batch-0-task"])
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None and batch.claims == (batch.claim,)
    assert batch.samples.refill_groups == 0 and len(batch.samples.samples) == 2
    full = await refilled(
        refill_groups=9, batches=2, informative=[f"batch-0-task{n}" for n in ("", "-1", "-2")]
    )
    assert await full.source.take_batch(wait_s=30) is not None
    assert len(full.scheduler.asked("LeaseBatch")) == 1


async def test_unused_refilled_batch_is_released_whole() -> None:
    """Every group returns into the window."""
    cluster = await refilled(refill_groups=2, batches=2, informative=[])
    await cluster.source.prepare()
    await cluster.source.release()
    released = cluster.scheduler.asked("ReleaseBatch")
    assert [one.batch_id for one in released] == ["batch-0", "batch-1"]


async def test_unreadable_group_of_a_refill_is_tombstoned() -> None:
    """The next lease takes its place; the batch keeps what it has."""
    cluster = await refilled(refill_groups=2, batches=3, informative=["batch-0-task"])
    cluster.pool.damaged = {"batch-1-task-1:2:0"}
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None
    (release,) = cluster.scheduler.asked("ReleaseBatch")
    assert list(release.task_ids) == ["batch-1-task-1"]
    assert [claim.batch_id for claim in batch.claims] == ["batch-0", "batch-2"]
