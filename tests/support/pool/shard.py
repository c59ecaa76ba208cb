"""A replicated shard: two real pool processes, one of which leads."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from forge.client.retry import retried
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.status import translated
from forge.runtime.security.credentials import Security
from forge.v1 import common_pb2
from services.pool.store import PoolStore
from tests.support.pool.account import Ledger, audit
from tests.support.pool.process import START_S, PoolClient, PoolProcess
from tests.support.pool.store import put_groups
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import LIMIT_S


class ReplicatedShard:
    """Both instances of one shard."""

    def __init__(
        self,
        folder: Path,
        *,
        etcd: EtcdServer,
        coordinator: Coordinator,
        cluster: str,
        shard: str,
        key_file: Path,
        settings: tuple[str, ...] = (),
    ) -> None:
        self.shard = shard
        self._etcd = etcd
        self._cluster = cluster
        self._coordinator = coordinator
        # On a busy machine who lives may be silent for seconds.
        self._settings = (
            *("--replication.durability", "replicated", "--lease-ttl-s", "10"),
            *("--replication.follower-timeout-s", "30"),
            *settings,
        )
        self.processes = [
            PoolProcess(folder / name, etcd=etcd, cluster=cluster, shard=shard, key_file=key_file)
            for name in ("a", "b")
        ]

    def put_before_start(self, group: common_pb2.GroupRecord) -> None:
        """Stores `group` in the first replica, so that it leads at once: an empty shard waits the
        lease of a replica with data."""
        store = PoolStore(self.processes[0].data_dir, shard=self.shard)
        put_groups(store, group)
        store.close()

    def start(self) -> None:
        """Starts those that do not run."""
        for process in self.processes:
            if process.process is None:
                process.start(*self._settings)

    async def keep_running(self) -> None:
        """Restarts ended processes, five looks a second as a supervisor, until cancelled."""
        while True:
            for process in self.processes:
                if process.ended:
                    process.start(*self._settings)
            await asyncio.sleep(0.2)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()

    async def leader(self) -> tuple[PoolProcess, Instance]:
        """The process that leads, once one of those that run does."""

        def leads(instance: Instance) -> bool:
            return instance.metadata.get("shard") == self.shard and bool(self._of(instance))

        (found, *_) = await self._coordinator.discover("pool").wait(timeout_s=START_S, where=leads)
        (process,) = self._of(found)
        return process, found

    def _of(self, instance: Instance) -> list[PoolProcess]:
        return [
            process
            for process in self.processes
            if process.process is not None and instance.instance_id.endswith(process.id_ending)
        ]

    async def client(self) -> PoolClient:
        """Speaks to the leader."""
        process, instance = await self.leader()
        return PoolClient(instance.address, Channels(Security(process.keyring, subject="test")))

    async def audit(self, ledger: Ledger) -> None:
        """What was acknowledged is with whoever leads."""

        @translated()
        async def audited() -> None:
            client = await self.client()
            try:
                await audit(client, ledger)
            finally:
                await client.close()

        # On a busy machine an election may come in between.
        await retried(audited, retry_for_s=LIMIT_S)

    async def kill(self, *processes: PoolProcess) -> None:
        """SIGKILL; on return their TTL has passed, as far as others can tell."""
        id_endings = [process.id_ending for process in processes]
        for process in processes:
            process.kill()
        for id_ending in id_endings:
            await self._etcd.end_leases(self._cluster, id_ending)

    async def kill_leader(self) -> PoolProcess:
        process, _ = await self.leader()
        await self.kill(process)
        return process

    async def freeze_leader(self) -> tuple[PoolProcess, Instance]:
        process, instance = await self.leader()
        assert process.process is not None
        process.process.send_signal(signal.SIGSTOP)
        return process, instance
