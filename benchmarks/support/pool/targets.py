"""Targets of `benchmarks.pool`: a real pool over gRPC, Redis and TransferQueue, each with a load
that appends the same records and reads them back.

- forge: `python -m services.pool` with etcd and tokens; four AppendTurns streams with `in_flight`
  turns unacknowledged each, 16 in a message, then FetchTrajectories. An answer means: checked and
  fsynced.
- redis: Redis 7 streams, `appendfsync always`: an answer means: fsynced.
- transferqueue: an answer means: in the memory of another process.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.support.cpu import cpu_s
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.runtime.coordination import Coordinator
from forge.runtime.process.child_processes import dying_with_parent
from forge.v1 import common_pb2, pool_pb2
from tests.support.pool.process import PoolClient, PoolProcess
from tests.support.runtime.etcd import EtcdServer, free_port

PEER_PYTHON = Path(".venv-peers/bin/python")
STREAMS = 4
TURNS = 16
"""Turns of one trajectory."""
COLUMN_TOKENS = 1000
"""Four columns of 4 bytes: a turn of 16 KB."""
PEER_START_S = 300.0


class Target(Protocol):
    """Something that takes records and gives them back; each call returns seconds."""

    async def append(self, records: int, in_flight: int) -> float: ...

    async def read(self, records: int, in_flight: int) -> float: ...

    async def clear(self) -> None: ...

    def cpu_s(self) -> float: ...


class Forge:
    """Trajectories of 16 turns."""

    def __init__(self, client: PoolClient, pid: int) -> None:
        self._client = client
        self._pid = pid
        self._runs = 0
        ids = int32_bytes(range(COLUMN_TOKENS))
        self._prompt_ids = ids
        self._sampled = common_pb2.SampledTokens(
            ids=ids,
            logprobs=float32_bytes([-0.5] * COLUMN_TOKENS),
            weight_versions=int32_bytes([7] * COLUMN_TOKENS),
        )

    async def append(self, records: int, in_flight: int) -> float:
        self._runs += 1
        started_s = time.perf_counter()
        await asyncio.gather(
            *(self._stream(one, records // STREAMS, in_flight) for one in range(STREAMS))
        )
        return time.perf_counter() - started_s

    async def _stream(self, stream: int, records: int, in_flight: int) -> None:
        slots = asyncio.Semaphore(in_flight)

        async def requests() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
            for begin in range(0, records, TURNS):
                turns = []
                for sequence in range(begin, min(begin + TURNS, records)):
                    await slots.acquire()
                    turn = self._turn(stream, sequence).SerializeToString()
                    turns.append(pool_pb2.WholeTurn(sequence=sequence, turn=turn))
                yield pool_pb2.AppendTurnsRequest(turns=turns)

        async for first in self._client.stub.AppendTurns(requests()):
            for answer in (first, *first.more):
                if answer.status_code:
                    raise RuntimeError(answer.error)
                slots.release()

    def _turn(self, stream: int, sequence: int) -> common_pb2.Turn:
        index = sequence % TURNS
        return common_pb2.Turn(
            trajectory_id=self._name(stream, sequence // TURNS),
            turn_index=index,
            parent_turn=index - 1,
            prompt_ids=self._prompt_ids,
            sampled=self._sampled,
            finish_reason=common_pb2.FINISH_REASON_STOP,
            temperature=1.0,
        )

    def _name(self, stream: int, trajectory: int) -> str:
        return f"run{self._runs}-{stream}:{trajectory}:0"

    async def read(self, records: int, in_flight: int) -> float:
        started_s = time.perf_counter()
        per_stream = records // STREAMS // TURNS
        per_call = max(1, in_flight // TURNS)

        async def one(stream: int) -> None:
            for begin in range(0, per_stream, per_call):
                numbers = range(begin, min(begin + per_call, per_stream))
                await self._client.fetch(*(self._name(stream, number) for number in numbers))

        await asyncio.gather(*(one(stream) for stream in range(STREAMS)))
        return time.perf_counter() - started_s

    async def clear(self) -> None:
        """Nothing: what is stored is not in the way of what comes."""

    def cpu_s(self) -> float:
        return cpu_s(self._pid)


class Peer:
    """A load in the peers' environment, and the servers it has."""

    def __init__(self, process: asyncio.subprocess.Process, servers: list[int]) -> None:
        self._process = process
        self._servers = servers

    async def append(self, records: int, in_flight: int) -> float:
        return await self._ask(
            do="append", records=records, in_flight=in_flight, column_bytes=4 * COLUMN_TOKENS
        )

    async def read(self, records: int, in_flight: int) -> float:
        return await self._ask(do="read", records=records, in_flight=in_flight)

    async def clear(self) -> None:
        await self._ask(do="clear")

    async def _ask(self, **request: object) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a peer ended when asked to {request['do']}")
        return float(answer)

    def cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self._servers if psutil.pid_exists(pid))


@asynccontextmanager
async def start_targets(folder: Path, peers: tuple[str, ...]) -> AsyncIterator[dict[str, Target]]:
    """Forge, and of `peers` those that are installed and start."""
    async with AsyncExitStack() as undo:
        found: dict[str, Target] = {"forge": await _forge(folder, undo)}
        for name in peers:
            peer = await _peer(name, folder, undo)
            if peer is not None:
                found[name] = peer
        yield found


async def _forge(folder: Path, undo: AsyncExitStack) -> Forge:
    etcd = EtcdServer(folder / "etcd")
    etcd.start()
    undo.callback(etcd.stop)
    pool = PoolProcess(folder / "pool", etcd=etcd, cluster="benchmark")
    pool.start("--store.map-bytes", str(1 << 32), "--lease-ttl-s", "60")
    undo.callback(pool.kill)
    coordinator = await Coordinator.connect(etcd.endpoint, cluster="benchmark")
    undo.push_async_callback(coordinator.close)
    client = await PoolClient.connect(pool, coordinator)
    undo.push_async_callback(client.close)
    return Forge(client, pool.pid)


async def _peer(name: str, folder: Path, undo: AsyncExitStack) -> Peer | None:
    argv = [str(PEER_PYTHON), "benchmarks/support/pool/peer.py", name]
    servers: list[int] = []
    if not PEER_PYTHON.exists():
        return None
    if name == "redis":
        binary = shutil.which("redis-server")
        if binary is None:
            return None
        port = free_port()
        argv.append(str(port))
        servers.append(_redis(binary, port, folder, undo))
    log = undo.enter_context((folder / f"{name}.log").open("wb"))
    process = await asyncio.create_subprocess_exec(
        *dying_with_parent(argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
    )
    undo.push_async_callback(_end, process)
    assert process.stdout is not None
    try:
        ready = await asyncio.wait_for(process.stdout.readline(), PEER_START_S)
    except TimeoutError:
        ready = b""
    if ready != b"ready\n":
        sys.stderr.write(f"{name} does not start; its log ends: {_last_line(folder, name)}\n")
        return None
    return Peer(process, servers)


def _redis(binary: str, port: int, folder: Path, undo: AsyncExitStack) -> int:
    data = folder / "redis"
    data.mkdir()
    process = subprocess.Popen(
        dying_with_parent(
            [
                *(binary, "--port", str(port), "--dir", str(data), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always", "--loglevel", "warning"),
            ]
        ),
        stdout=subprocess.DEVNULL,
    )
    undo.callback(process.wait)
    undo.callback(process.kill)
    return process.pid


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _last_line(folder: Path, name: str) -> str:
    lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    return lines[-1] if lines else "empty"
