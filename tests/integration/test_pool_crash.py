"""kill -9 of a real pool under load, at random points: what was acknowledged is there, and right.

FORGE_CRASH_ROUNDS sets how often (default 10).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest_asyncio

from forge.core.errors import Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.chunks import split
from forge.runtime.rpc.status import translated
from forge.v1 import common_pb2, pool_pb2
from tests.support.etcd import EtcdServer
from tests.support.pool_process import PoolClient, PoolProcess
from tests.support.pool_records import make_group, make_reward, make_turn

ROUNDS = int(os.environ.get("FORGE_CRASH_ROUNDS", "10"))
WRITERS = 4
TURNS = 3
"""Of each trajectory."""


class Ledger:
    """What the pool has acknowledged, in any of its lives."""

    def __init__(self) -> None:
        self.turns: set[tuple[str, int]] = set()
        self.sealed: dict[str, common_pb2.TrajectorySummary] = {}
        self.groups: set[str] = set()
        self.count = 0
        self._news = asyncio.Event()

    def add(self) -> None:
        self.count += 1
        self._news.set()

    async def reach(self, count: int) -> None:
        while self.count < count:
            self._news.clear()
            await self._news.wait()

    def trajectories(self) -> list[str]:
        return sorted({trajectory_id for trajectory_id, _ in self.turns} | set(self.sealed))


def turn_of(trajectory_id: str, index: int) -> common_pb2.Turn:
    """The one turn there can be under this name: its content is drawn from it."""
    draw = random.Random(f"{trajectory_id}/{index}")
    # Some need pages of their own, a few need several chunks.
    size = draw.choice([10, 10, 1_000, 1_000, 20_000, 400_000])
    return make_turn(
        trajectory_id, index, prompt=[draw.randrange(1 << 31)] * size, sampled=range(index + 1)
    )


async def write(client: PoolClient, ledger: Ledger, names: Iterator[str]) -> None:
    """Puts groups, appends and seals, noting what is acknowledged, until the pool dies."""
    with contextlib.suppress(Unavailable):
        async with translated():
            await fill(client, ledger, names)


async def fill(client: PoolClient, ledger: Ledger, names: Iterator[str]) -> None:
    for task_id in names:
        group = make_group(task_id, int(task_id.removeprefix("t")))
        await client.stub.PutGroups(pool_pb2.PutGroupsRequest(groups=[group], fence=1))
        ledger.groups.add(task_id)
        ledger.add()
        trajectory_id = f"{task_id}:0:0"
        await append(client, ledger, [turn_of(trajectory_id, i) for i in range(TURNS)])
        ledger.sealed[trajectory_id] = await client.seal(trajectory_id, TURNS, [make_reward()])
        ledger.add()


async def append(client: PoolClient, ledger: Ledger, turns: list[common_pb2.Turn]) -> None:
    async def requests() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
        for turn in turns:
            for chunk in split(turn.SerializeToString()):
                yield pool_pb2.AppendTurnsRequest(sequence=turn.turn_index, turn=chunk)

    async for answer in client.stub.AppendTurns(requests()):
        assert answer.status_code == 0, answer.error
        ledger.turns.add((turns[0].trajectory_id, answer.sequence))
        ledger.add()


async def audit(client: PoolClient, ledger: Ledger) -> None:
    """Every acknowledged turn, seal and group is there and equal, and nothing is half there."""
    listed = {response.group.task.task_id: response for response in await client.groups()}
    assert ledger.groups <= set(listed)
    for trajectory in await client.fetch(*ledger.trajectories()):
        stored = {turn.turn_index: turn for turn in trajectory.turns}
        for index, turn in stored.items():
            assert turn == turn_of(trajectory.trajectory_id, index)
        expected = {index for name, index in ledger.turns if name == trajectory.trajectory_id}
        assert expected <= set(stored)
        sealed = ledger.sealed.get(trajectory.trajectory_id)
        if sealed is not None:
            assert trajectory.state == common_pb2.TRAJECTORY_STATE_SEALED
            assert len(stored) == TURNS
            assert sealed in listed[trajectory.task_id].trajectories


@pytest_asyncio.fixture
async def pool(tmp_path: Path, etcd: EtcdServer, cluster: str) -> AsyncIterator[PoolProcess]:
    process = PoolProcess(tmp_path / "pool", etcd=etcd, cluster=cluster)
    yield process
    process.kill()


async def test_kill_9_loses_nothing_acknowledged(pool: PoolProcess, coordinator: Coordinator):
    """Killed again and again while four writers append, seal and queue, the pool comes back each
    time with every acknowledged record whole, and takes the rest when it is sent again."""
    draw = random.Random(0)
    ledger = Ledger()
    numbers = itertools.count()
    for _ in range(ROUNDS):
        # A small first map: some of the kills hit while it grows.
        pool.start("--map-bytes", str(1 << 20))
        client = await PoolClient.connect(pool, coordinator)
        await audit(client, ledger)
        names = (f"t{number}" for number in numbers)
        writers = [asyncio.create_task(write(client, ledger, names)) for _ in range(WRITERS)]
        await ledger.reach(ledger.count + draw.randrange(1, 60))
        await asyncio.sleep(draw.random() * 0.01)
        pool.kill()
        await asyncio.gather(*writers)
        await client.close()
    pool.start()
    client = await PoolClient.connect(pool, coordinator)
    await audit(client, ledger)
    for trajectory_id in {name for name, _ in ledger.turns} - set(ledger.sealed):
        await append(client, ledger, [turn_of(trajectory_id, i) for i in range(TURNS)])
        ledger.sealed[trajectory_id] = await client.seal(trajectory_id, TURNS, [make_reward()])
    await audit(client, ledger)
    await client.close()
    assert ledger.count > ROUNDS
