"""Replicas of one shard in one process: the real stores and the real link between them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

from forge.core.errors import ForgeError, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.rpc.chunks import Joiner
from forge.v1 import common_pb2
from forge.v1 import replica_pb2 as pb
from services.pool import validation
from services.pool.data.commands import AppendTurns, FollowLeader, FreeGroups
from services.pool.readers import ReaderThreads
from services.pool.replication.catch_up import CatchUp
from services.pool.replication.follower_link import Link
from services.pool.storage.journal import (
    SENT,
    Changes,
    ReplicaState,
    adopt,
    follower_state,
    replica_state,
)
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_reward, make_turn
from tests.support.pool.store import change, commit, put_groups, reward, seal, set_states
from tests.support.runtime.waiting import settle

SHARD = "s0"
LINEAGE = "lineage"
TERM = 1
PENDING = common_pb2.GROUP_STATE_PENDING
TRAINED = common_pb2.GROUP_STATE_TRAINED
TOMBSTONED = common_pb2.GROUP_STATE_TOMBSTONED


class Node:
    """One replica; commits go to its link, if it has one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.link: Link | None = None
        self.term = TERM
        self.store = self._open()

    def _open(self) -> PoolStore:
        store = PoolStore(self.directory, shard=SHARD)
        store.count_commits(self._told)
        return store

    def _told(self, position: int, changes: Changes) -> None:
        if self.link is not None:
            self.link.add(position, changes)

    def lead(self, *, term: int = TERM) -> None:
        self.term = term
        self.store.write(partial(adopt, lineage=LINEAGE, term=term))

    def crash(self) -> None:
        """Comes back with what is on its disk."""
        self.store.close()
        self.store = self._open()

    def state(self) -> ReplicaState:
        return self.store.read(replica_state)

    def follower_state(self) -> pb.FollowerState:
        return self.store.read(partial(follower_state, shard=SHARD))

    def take(self, *steps: pb.FollowStep) -> int:
        position: int = commit(self.store, FollowLeader(steps=steps))
        return position

    def dump(self) -> dict[Table, list[tuple[bytes, bytes]]]:
        """Every record that replicas have in common."""
        return self.store.read(
            lambda records: {table: list(records.scan_checksummed(table)) for table in SENT}
        )


async def settle_reads(link: Link, rounds: int = 3) -> None:
    """Lets `link` send what it can: its page reads run one after another on one thread."""
    for _ in range(rounds):
        await settle()
        await link._readers.run(lambda: None)


def catching_up(leader: Node, follower: Node) -> CatchUp:
    return CatchUp(leader.state(), follower.follower_state(), term=leader.term)


class Writes:
    """Random changes such as gateways, schedulers and retention make."""

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._tasks: list[str] = []

    def some(self, node: Node, count: int) -> None:
        for _ in range(count):
            # Sent again or sent wrongly, a change is refused, which changes nothing.
            try:
                self._one(node.store)
            except ForgeError:
                continue

    def _one(self, store: PoolStore) -> None:
        draw = self._draw
        if not self._tasks or draw.random() < 0.3:
            self._tasks.append(f"t{len(self._tasks)}")
            put_groups(store, make_group(self._tasks[-1], len(self._tasks)))
        task_id = draw.choice(self._tasks)
        trajectory_id = f"{task_id}:{draw.randrange(2)}:0"
        match draw.randrange(6):
            case 0 | 1 | 2:
                size = draw.choice([10, 3_000, 300_000])
                index = draw.randrange(3)
                turn = make_turn(trajectory_id, index, parent=-1, messages_json="x" * size)
                new = validation.new_turn(turn.SerializeToString())
                commit(store, AppendTurns(turns=(new,)))
            case 3:
                seal(store, trajectory_id, turns=0, state=common_pb2.TRAJECTORY_STATE_ABANDONED)
            case 4:
                reward(store, make_reward(f"e{draw.randrange(5)}"), trajectory_id=trajectory_id)
            case _:
                state = draw.choice([TRAINED, TRAINED, TOMBSTONED, PENDING])
                set_states(store, change(task_id, state, step=int(state == TRAINED)))
                if draw.random() < 0.5:
                    free = FreeGroups(
                        task_ids=(task_id,), covered_step=1, max_records=2, now_unix_s=1.0
                    )
                    commit(store, free)


@asynccontextmanager
async def linked(
    leader: Node, follower: Node, *, most_steps: float = math.inf
) -> AsyncIterator[Link]:
    """`follower` follows `leader` inside; at the end, or after so many steps, the line is cut,
    wherever things are."""
    readers = ReaderThreads(1)
    link = leader.link = Link(
        leader.store,
        readers,
        follower.follower_state(),
        lineage=LINEAGE,
        term=leader.term,
        position=leader.state().position,
        timeout_s=60.0,
        on_confirmed=lambda position: _confirmed(leader, position),
    )
    try:
        async with delivering(link, follower, most_steps=most_steps):
            yield link
    finally:
        leader.link = None
        await readers.close()


@asynccontextmanager
async def delivering(
    link: Link, follower: Node, *, most_steps: float = math.inf
) -> AsyncIterator[None]:
    """What `link` sends reaches `follower`, and its confirmations come back."""
    confirmations: asyncio.Queue[pb.FollowRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.FollowRequest]:
        while True:
            yield await confirmations.get()

    async def deliver() -> None:
        joiner = Joiner()
        taken = 0
        async for response in link.responses(requests()):
            whole = joiner.add(response.step)
            if whole is None:
                continue
            position = follower.take(pb.FollowStep.FromString(whole))
            if position:
                confirmations.put_nowait(pb.FollowRequest(durable_position=position))
            taken += 1
            if taken >= most_steps:
                link.end(Unavailable("cut"))
                return
            await asyncio.sleep(0)

    delivery = asyncio.create_task(deliver())
    try:
        yield
    finally:
        await cancel_and_wait(delivery)
        link.end(Unavailable("cut"))


def _confirmed(leader: Node, position: int) -> None:
    leader.store.confirmed_position = position
