"""Real scheduler and pool processes on a real etcd, and a client that plays every part around
them: operator, runner, gateway and trainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.client.operator import Operator
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2
from forge.v1.pool_pb2_grpc import PoolServiceStub
from forge.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.support.pool.process import PoolProcess
from tests.support.pool.records import make_reward, make_turn
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.log_lines import log_lines
from tests.support.runtime.service_process import start_service
from tests.support.runtime.waiting import until

START_S = 120.0
CALL_S = 60.0
WAIT_S = 30.0
"""For rollouts or a batch, at the leader."""
LOOK_S = 0.1
"""From one look into a log to the next."""
DEFAULTS = {
    "lease_ttl_s": "10",
    "takeover_hold_s": "0.2",
    "pool_timeout_s": "4",
}
QUEUE_DEFAULTS = {
    "concurrency": "8",
    "window": "4",
    "batch_groups": "2",
    "short_batch_after_s": "0.2",
    "retry_backoff_s": "0.05",
}


def make_task(
    task_id: str, *, domain: str = "code", size: int = 1, evaluation: bool = False, tag: str = ""
) -> common_pb2.Task:
    return common_pb2.Task(
        task_id=task_id,
        domain=domain,
        scaffold="blackbox",
        payload_json=json.dumps({"question": task_id}),
        group_size=size,
        purpose=common_pb2.PURPOSE_EVAL if evaluation else common_pb2.PURPOSE_TRAIN,
        tag=tag,
    )


class SchedulerProcess:
    """One `python -m services.scheduler`."""

    def __init__(self, argv: Sequence[str], *, instance_id: str, log_path: Path) -> None:
        self.id_ending = instance_id
        self.log_path = log_path
        self.process = start_service("services.scheduler", *argv, "--instance-id", instance_id)

    def kill(self) -> None:
        """SIGKILL, frozen or not; `SchedulerCluster.kill` tells the others."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=START_S)

    def logged(self, event: str) -> list[dict[str, Any]]:
        if not self.log_path.exists():
            return []
        return [line for line in log_lines(self.log_path) if line["event"] == event]

    async def until_logged(self, event: str, *, times: int = 1) -> list[dict[str, Any]]:
        """The events of that name, once there are so many."""
        await until(lambda: len(self.logged(event)) >= times)
        return self.logged(event)


class SchedulerCluster:
    """Everything a test needs, started on demand and killed at the end."""

    def __init__(
        self, folder: Path, *, etcd: EtcdServer, cluster: str, coordinator: Coordinator
    ) -> None:
        self._folder = folder
        self._etcd = etcd
        self._cluster = cluster
        self.coordinator = coordinator
        self._key_file = folder / "key"
        self.keyring = Keyring.generate(self._key_file)
        self.channels = Channels(Security(self.keyring, subject="test"))
        self.pools: dict[str, PoolProcess] = {}
        self.schedulers: list[SchedulerProcess] = []
        self._schedulers = Remote(
            coordinator, self.channels, kind="scheduler", stub=SchedulerServiceStub
        )
        self._pools = Remote(coordinator, self.channels, kind="pool", stub=PoolServiceStub)

    # Processes

    def start_pool(self, shard: str = "s0", *settings: str) -> PoolProcess:
        if shard not in self.pools:
            folder = self._folder / f"pool-{shard}"
            folder.mkdir(exist_ok=True)
            shutil.copy(self._key_file, folder / "key")
            self.pools[shard] = PoolProcess(
                folder, etcd=self._etcd, cluster=self._cluster, shard=shard
            )
        self.pools[shard].start("--lease-ttl-s", DEFAULTS["lease_ttl_s"], *settings)
        return self.pools[shard]

    def start_scheduler(
        self, *, queue: Mapping[str, str] | None = None, **settings: str
    ) -> SchedulerProcess:
        """`queue`: settings of the table [queue]."""
        instance_id = f"scheduler-{len(self.schedulers)}"
        log_path = self._folder / f"{instance_id}.log"
        table = QUEUE_DEFAULTS | dict(queue or {})
        chosen = DEFAULTS | settings | {f"queue.{key}": value for key, value in table.items()}
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in chosen.items()]
        argv = [
            *("--etcd", self._etcd.endpoint),
            *("--cluster", self._cluster, "--key-file", str(self._key_file)),
            *("--log-file", str(log_path), *flags),
        ]
        process = SchedulerProcess(argv, instance_id=instance_id, log_path=log_path)
        self.schedulers.append(process)
        return process

    async def kill(self, process: SchedulerProcess | PoolProcess) -> None:
        """SIGKILL; on return its TTL has passed, as far as others can tell."""
        id_ending = process.id_ending
        process.kill()
        await self.end_leases(id_ending)

    async def end_leases(self, id_ending: str) -> None:
        """As when its TTL has passed; on return the instance whose id ends so is not found."""
        await self._etcd.end_leases(self._cluster, id_ending)
        await self.gone(id_ending)

    async def gone(self, id_ending: str) -> None:
        """Returns once the instance whose id ends so is not found."""
        for kind in ("pool", "scheduler"):
            discovery = self.coordinator.discover(kind)
            while any(found.instance_id.endswith(id_ending) for found in discovery.instances):
                await discovery.changed()

    async def close(self) -> None:
        for scheduler in self.schedulers:
            scheduler.kill()
        for pool in self.pools.values():
            pool.kill()
        await self.channels.close()

    # Calls

    async def leader(self, *, other_than: str = "") -> Instance:
        """The instance that leads, once one does."""
        (found, *_) = await self.coordinator.discover("scheduler").wait(
            timeout_s=START_S,
            where=lambda i: i.metadata.get("leader") == "true" and i.instance_id != other_than,
        )
        return found

    async def ask(self, method: str, request: Any, *, retry_for_s: float = START_S) -> Any:
        """A call to whoever leads."""
        return await self._schedulers.call(
            method,
            request,
            timeout_s=CALL_S,
            retry_for_s=retry_for_s,
            where=lambda instance: instance.metadata.get("leader") == "true",
        )

    async def ask_instance(self, instance: Instance, method: str, request: Any) -> Any:
        """A call to one particular instance, leader or not; no retry."""
        async with translated():
            return await getattr(self._schedulers.stub(instance), method)(request, timeout=CALL_S)

    async def ask_pool(self, shard: str, method: str, request: Any) -> Any:
        return await self._pools.call(
            method,
            request,
            timeout_s=CALL_S,
            retry_for_s=START_S,
            where=lambda instance: instance.metadata["shard"] == shard,
        )

    async def submit(self, tasks: Iterable[common_pb2.Task]) -> int:
        request = scheduler_pb2.SubmitTasksRequest(tasks=tasks)
        return int((await self.ask("SubmitTasks", request)).accepted)

    async def status(self) -> scheduler_pb2.GetSchedulerStatusResponse:
        request = scheduler_pb2.GetSchedulerStatusRequest()
        status: scheduler_pb2.GetSchedulerStatusResponse = await self.ask(
            "GetSchedulerStatus", request
        )
        return status

    async def groups(self, tag: str = "") -> list[scheduler_pb2.BatchGroup]:
        operator = Operator(self.coordinator, self.channels, retry_for_s=START_S)
        return [group async for group in operator.groups(tag)]

    # The runner's and the gateway's part

    async def lease(
        self,
        count: int = 1,
        *,
        wait_s: float = WAIT_S,
        runner: str = "runner",
        domains: Sequence[str] = (),
        scaffolds: Sequence[str] = (),
    ) -> list[scheduler_pb2.RolloutLease]:
        """`domains` and `scaffolds`: as the runner declares them."""
        request = scheduler_pb2.LeaseRolloutsRequest(
            runner_id=runner,
            max_rollouts=count,
            wait_s=wait_s,
            domains=domains,
            scaffolds=scaffolds,
        )
        return list((await self.ask("LeaseRollouts", request)).leases)

    async def renew(self, leases: Iterable[scheduler_pb2.RolloutLease]) -> list[str]:
        """The ids that are lost."""
        ids = [lease.lease_id for lease in leases]
        request = scheduler_pb2.RenewRolloutsRequest(lease_ids=ids)
        return list((await self.ask("RenewRollouts", request)).lost)

    async def seal(
        self,
        lease: scheduler_pb2.RolloutLease,
        *,
        reward: float = 1.0,
        sampled: Sequence[int] = (4, 5),
    ) -> None:
        """What the gateway does: one turn, then the seal."""
        shard = self.keyring.verify(lease.session_token, now_s=0.0).pool_shard
        turn = pool_pb2.AppendTurnsRequest(
            sequence=1,
            turn=one_chunk(make_turn(lease.trajectory_id, sampled=sampled)),
        )
        _, stub = await self._pools.pick(
            where=lambda i: i.metadata["shard"] == shard, timeout_s=START_S
        )
        async for answer in stub.AppendTurns(iter([turn]), timeout=CALL_S):
            assert answer.status_code == 0, answer.error
        request = pool_pb2.SealTrajectoryRequest(
            trajectory_id=lease.trajectory_id,
            task_id=lease.task.task_id,
            domain=lease.task.domain,
            turns=1,
            rewards=[make_reward(value=reward)],
            state=common_pb2.TRAJECTORY_STATE_SEALED,
        )
        await self.ask_pool(shard, "SealTrajectory", request)

    async def finish(
        self,
        leases: Iterable[scheduler_pb2.RolloutLease],
        *,
        error: str = "",
        permanent: bool = False,
    ) -> None:
        outcomes = [
            scheduler_pb2.FinishRolloutsRequest.Outcome(
                lease_id=lease.lease_id,
                trajectory_id=lease.trajectory_id,
                error=error,
                permanent=permanent,
            )
            for lease in leases
        ]
        await self.ask("FinishRollouts", scheduler_pb2.FinishRolloutsRequest(outcomes=outcomes))

    async def complete(self, count: int, *, reward: float = 1.0) -> None:
        """Lease, seal and finish `count` rollouts."""
        while count:
            leases = await self.lease(count)
            for lease in leases:
                await self.seal(lease, reward=reward)
            await self.finish(leases)
            count -= len(leases)

    async def complete_until(self, *, groups: int) -> None:
        """Lease, seal and finish until that many groups are complete, however often claims expire
        on the way."""
        while True:
            status = await self.status()
            if status.complete_in_window + status.complete_outside_window >= groups:
                return
            leases = await self.lease(groups, wait_s=0.5)
            for lease in leases:
                await self.seal(lease)
            await self.finish(leases)

    # The trainer's part

    async def take(
        self, *, trainer: str = "trainer", groups: int = 0, wait_s: float = WAIT_S
    ) -> scheduler_pb2.LeaseBatchResponse:
        request = scheduler_pb2.LeaseBatchRequest(
            trainer_id=trainer, max_groups=groups, wait_s=wait_s
        )
        response: scheduler_pb2.LeaseBatchResponse = await self.ask("LeaseBatch", request)
        return response

    async def commit(
        self, batch: scheduler_pb2.LeaseBatchResponse, step: int, *, name_groups: bool = True
    ) -> None:
        ids = [group.group.task.task_id for group in batch.groups] if name_groups else []
        request = scheduler_pb2.CommitBatchRequest(batch_id=batch.batch_id, step=step, task_ids=ids)
        await self.ask("CommitBatch", request)


def one_chunk(turn: common_pb2.Turn) -> common_pb2.Chunk:
    return common_pb2.Chunk(data=turn.SerializeToString(), last=True)


def ids_of(batch: scheduler_pb2.LeaseBatchResponse) -> list[str]:
    return [group.group.task.task_id for group in batch.groups]


def assert_counts_balance(status: scheduler_pb2.GetSchedulerStatusResponse) -> None:
    assert status.accepted == status.trained + status.tombstoned + status.pending, status
