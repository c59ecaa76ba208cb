"""Refill of a batch: further groups in place of flat ones."""

from __future__ import annotations

import pytest

from forge.core.errors import DeadlineExceeded, ForgeError, Unavailable
from services.trainer.batches import batch_source
from tests.support.trainer.batch_cluster import HANGS, Cluster


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


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Unavailable("no leader"), id="unreachable"),
        pytest.param(DeadlineExceeded("no response"), id="slow"),
        pytest.param(HANGS, id="hung"),
    ],
)
async def test_refill_does_not_wait_for_a_scheduler_that_does_not_answer(
    fault: ForgeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its longest wait is that of a refill, not that of a batch; the batch keeps what it has."""
    monkeypatch.setattr(batch_source, "LATE_S", 0.0, raising=False)
    cluster = await refilled(refill_groups=9, batches=5, informative=["batch-0-task"])
    cluster.scheduler.refill_fault = fault
    batch = await cluster.source.take_batch(wait_s=30)
    assert batch is not None and batch.claims == (batch.claim,)
    assert len(cluster.scheduler.asked("LeaseBatch")) == 2


async def test_stop_during_a_refill_ends_the_preparation() -> None:
    """A step that would be discarded is not planned."""
    cluster = await refilled(refill_groups=9, batches=5, informative=["batch-0-task"])
    cluster.scheduler.refill_fault = Unavailable("stops")
    cluster.source.hurry()
    with pytest.raises(Unavailable, match="stops"):
        await cluster.source.take_batch(wait_s=30)
