"""A runner gets no task whose code it lacks, and the status names tasks without a runner."""

from __future__ import annotations

import asyncio

from tests.support.scheduler.cluster import SchedulerCluster, make_task


async def test_runner_gets_only_tasks_of_its_domains(forge: SchedulerCluster) -> None:
    """An earlier task of another domain is skipped, waits, and is visible until a runner declares
    it; a runner of an earlier release declares nothing and gets any task."""
    forge.start_scheduler()
    await forge.submit([make_task("a", domain="own-domain"), make_task("b"), make_task("c")])
    (lease,) = await forge.lease(domains=["code"], scaffolds=["blackbox"])
    assert lease.task.task_id == "b"
    unserved = (await forge.status()).unserved
    assert [(kind.domain, kind.scaffold) for kind in unserved] == [("own-domain", "blackbox")]
    assert not await forge.lease(runner="other", scaffolds=["whitebox"], wait_s=0.2)

    (lease,) = await forge.lease(runner="able", domains=["own-domain"])
    assert lease.task.task_id == "a"
    assert not (await forge.status()).unserved
    (lease,) = await forge.lease(runner="old")
    assert lease.task.task_id == "c"


async def test_waiting_runners_do_not_hide_each_other(forge: SchedulerCluster) -> None:
    """A later task goes to the able runner, although another one requested first."""
    forge.start_scheduler()
    await forge.leader()
    first = asyncio.create_task(forge.lease(runner="first", domains=["code"], wait_s=20))
    second = asyncio.create_task(forge.lease(runner="second", domains=["own-domain"], wait_s=20))
    await forge.submit([make_task("a", domain="own-domain")])
    assert [lease.task.task_id for lease in await second] == ["a"]
    await forge.submit([make_task("b")])
    assert [lease.task.task_id for lease in await first] == ["b"]
