"""A scheduler and a pool with a trainer between them, and the groups that it trains."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest_asyncio

from forge.runtime.coordination import Coordinator
from forge.v1 import common_pb2, trainer_pb2
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import SchedulerCluster, make_task
from tests.support.trainer.process import TrainerClient, TrainerProcess

GROUPS_PER_STEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A scheduler, a pool, and a trainer to be started."""

    cluster: SchedulerCluster
    trainer: TrainerProcess
    client: TrainerClient

    async def feed(self, first: int, count: int) -> None:
        """Submit groups of two and let every rollout of them succeed or fail."""
        numbers = range(first, first + count)
        await self.cluster.submit([make_task(f"task-{n}", size=2) for n in numbers])
        for n in range(count):
            await self.cluster.complete(1, reward=1.0)
            await self.cluster.complete(1, reward=float(n % 2))

    async def train_past_checkpoint(self, *, limit_s: float) -> None:
        """Train three steps and wait until the checkpoint of the second is saved."""
        await self.feed(0, 3 * GROUPS_PER_STEP)
        await self.client.until_step(3)

        async def saved() -> bool:
            return (await self.client.status()).checkpoint_step == 2

        await until(saved, limit_s=limit_s)

    async def trained(self) -> dict[str, int]:
        """Step of every group that was trained."""
        groups = await self.cluster.groups()
        return {
            group.group.task.task_id: group.group.step
            for group in groups
            if group.group.state == common_pb2.GROUP_STATE_TRAINED
        }


@pytest_asyncio.fixture
async def trainer_stack(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[Stack]:
    """A scheduler, a pool, and a trainer that is killed at the end if it runs."""
    services = SchedulerCluster(tmp_path, etcd=etcd, cluster=cluster, coordinator=coordinator)
    services.start_pool()
    services.start_scheduler(queue={"batch_groups": str(GROUPS_PER_STEP)})
    trainer = TrainerProcess(tmp_path, etcd=etcd, cluster=cluster, key_file=tmp_path / "key")
    client = TrainerClient(coordinator, services.channels)
    try:
        yield Stack(cluster=services, trainer=trainer, client=client)
    finally:
        trainer.kill()
        await services.close()


async def until_finished(client: TrainerClient) -> trainer_pb2.GetTrainerStatusResponse:
    """The status, once all steps are taken."""

    async def finished() -> trainer_pb2.GetTrainerStatusResponse | None:
        status = await client.status()
        return status if status.phase == trainer_pb2.TRAINER_PHASE_FINISHED else None

    return await until(finished)
