"""A real pool instance as a child process, and a client that speaks to it as the services do."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import Joiner, split
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.service_process import ServiceProcess, start_service

START_S = 120.0
CALL_S = 60.0


class PoolProcess:
    """One `python -m services.pool` with its data, key and log under `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        etcd: EtcdServer,
        cluster: str,
        shard: str = "s0",
        key_file: Path | None = None,
        module: str = "services.pool",
    ) -> None:
        """`key_file` is one that other processes of the cluster have as well; `module` is run in
        place of the service."""
        folder.mkdir(parents=True, exist_ok=True)
        self.data_dir = folder / "data"
        self.log_path = folder / "pool.log"
        self._key_file = key_file or folder / "key"
        self.keyring = Keyring.from_file(key_file) if key_file else Keyring.generate(self._key_file)
        self._module = module
        self._argv = [
            *("--etcd", etcd.endpoint),
            *("--cluster", cluster, "--key-file", str(self._key_file), "--shard", shard),
            *("--data-dir", str(self.data_dir), "--log-file", str(self.log_path)),
            *("--lease-ttl-s", "2", "--store.disk-reserve-bytes", "0"),
        ]
        self.process: ServiceProcess | None = None

    def start(self, *settings: str) -> None:
        """Starts it; it has registered once `PoolClient.connect` returns."""
        self.process = start_service(self._module, *self._argv, *settings, stderr=subprocess.PIPE)

    @property
    def id_ending(self) -> str:
        """How the instance id of the process that runs ends."""
        return f"-{self.pid}"

    @property
    def ended(self) -> bool:
        """Whether it ended by itself."""
        return self.process is not None and self.process.poll() is not None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM, without waiting."""
        assert self.process is not None
        self.process.terminate()

    def wait(self) -> tuple[int, str]:
        """Exit code and stderr, once it has ended."""
        assert self.process is not None
        _, stderr = self.process.communicate(timeout=START_S)
        return self.process.wait(), stderr


class PoolClient:
    """Calls to one pool instance."""

    def __init__(self, address: str, channels: Channels) -> None:
        self.address = address
        self._channels = channels
        self.stub = pool_pb2_grpc.PoolServiceStub(channels.get(address))

    @classmethod
    async def connect(cls, pool: PoolProcess, coordinator: Coordinator) -> PoolClient:
        """To the running process of `pool`, once it has registered."""
        (instance,) = await coordinator.discover("pool").wait(
            timeout_s=START_S, where=lambda found: found.instance_id.endswith(pool.id_ending)
        )
        return cls(instance.address, Channels(Security(pool.keyring, subject="test")))

    async def append(self, turns: Iterable[common_pb2.Turn]) -> list[pool_pb2.AppendTurnsResponse]:
        """Sends each turn on one stream, numbered from 0; the answers in order of arrival."""
        requests = (
            pool_pb2.AppendTurnsRequest(sequence=sequence, turn=chunk)
            for sequence, turn in enumerate(turns)
            for chunk in split(turn.SerializeToString())
        )
        return await self.exchange(requests)

    async def exchange(
        self, requests: Iterable[pool_pb2.AppendTurnsRequest]
    ) -> list[pool_pb2.AppendTurnsResponse]:
        async def stream() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
            for request in requests:
                yield request

        return [answer async for answer in self.stub.AppendTurns(stream(), timeout=CALL_S)]

    async def seal(
        self,
        trajectory_id: str,
        turns: int,
        rewards: Sequence[common_pb2.RewardEvent] = (),
        *,
        domain: str = "code",
    ) -> common_pb2.TrajectorySummary:
        request = pool_pb2.SealTrajectoryRequest(
            trajectory_id=trajectory_id,
            domain=domain,
            turns=turns,
            rewards=rewards,
            state=common_pb2.TRAJECTORY_STATE_SEALED,
        )
        return (await self.stub.SealTrajectory(request, timeout=CALL_S)).summary

    async def fetch(self, *trajectory_ids: str) -> list[common_pb2.Trajectory]:
        request = pool_pb2.FetchTrajectoriesRequest(trajectory_ids=trajectory_ids)
        joiner = Joiner()
        found = []
        async for piece in self.stub.FetchTrajectories(request, timeout=CALL_S):
            whole = joiner.add(piece.trajectory)
            if whole is not None:
                found.append(common_pb2.Trajectory.FromString(whole))
        return found

    async def groups(self, *, since: str | None = None) -> list[pool_pb2.ScanGroupsResponse]:
        scan = self.stub.ScanGroups(pool_pb2.ScanGroupsRequest(since=since), timeout=CALL_S)
        return [response async for response in scan]

    async def close(self) -> None:
        await self._channels.close()
