"""Batches are claimed, kept, fetched and prepared one ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge.core.errors import ForgeError, NotFound
from services.trainer.batches import trajectory_fetch
from tests.support.trainer.batch_cluster import Cluster


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
