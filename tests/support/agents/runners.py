"""A gateway stack with a real scheduler, and runners as processes."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from forge.client.operator import Operator
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2, scheduler_pb2
from tests.support.gateway.stack import START_S, GatewayStack
from tests.support.runtime.service_process import ServiceProcess, start_service
from tests.support.runtime.waiting import until

ENDED = (common_pb2.GROUP_STATE_EVALUATED, common_pb2.GROUP_STATE_TOMBSTONED)


@dataclass(kw_only=True)
class Cluster:
    """A gateway stack with a scheduler, and runners on demand: all of one test."""

    stack: GatewayStack
    coordinator: Coordinator
    channels: Channels
    operator: Operator
    tag: str
    """Of the test's tasks."""
    runners: list[ServiceProcess] = field(default_factory=list)

    def start_runner(self, *settings: str) -> ServiceProcess:
        name = self.runner_name(len(self.runners))
        argv = ["run", *self.stack.shared(name), *settings]
        self.runners.append(start_service("forge.agents", *argv, stderr=subprocess.PIPE))
        return self.runners[-1]

    def runner_name(self, number: int = 0) -> str:
        """In the order they are started."""
        return f"{self.tag}-runner-{number}"

    async def submit(self, *tasks: common_pb2.Task) -> None:
        for one in tasks:
            one.tag = one.tag or self.tag
        await self.operator.submit(tasks)

    async def running(self, rollouts: int) -> None:
        """Wait until that many rollouts are leased."""

        async def leased() -> bool:
            return (await self.operator.scheduler_status()).running_rollouts >= rollouts

        await until(leased)

    async def ended(self, *tasks: common_pb2.Task) -> dict[str, scheduler_pb2.BatchGroup]:
        """Submit evaluation tasks and wait until each is evaluated or given up."""
        await self.submit(*tasks)
        return await self.ended_of(*(one.task_id for one in tasks))

    async def ended_of(self, *task_ids: str) -> dict[str, scheduler_pb2.BatchGroup]:
        """Wait until each submitted task is evaluated or given up."""

        async def all_ended() -> dict[str, scheduler_pb2.BatchGroup]:
            groups = {g.group.task.task_id: g async for g in self.operator.groups(self.tag)}
            done = {name: g for name, g in groups.items() if g.group.state in ENDED}
            return done if done.keys() == set(task_ids) else {}

        return await until(all_ended, limit_s=2 * START_S)

    async def stop(self) -> None:
        """In good order: the scheduler gives no more work to a runner that has left."""
        for runner in self.runners:
            runner.terminate()
        for runner in self.runners:
            await asyncio.to_thread(runner.communicate, timeout=START_S)


@asynccontextmanager
async def cluster_on(
    stack: GatewayStack, coordinator: Coordinator, tag: str
) -> AsyncIterator[Cluster]:
    channels = Channels(Security(stack.pool.keyring, subject="test"))
    operator = Operator(coordinator, channels, retry_for_s=START_S)
    made = Cluster(
        stack=stack, coordinator=coordinator, channels=channels, operator=operator, tag=tag
    )
    await stack.gateway(coordinator)
    yield made
    await made.stop()
    await channels.close()
