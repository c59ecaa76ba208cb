"""Fetches the trajectories of leased groups from the pool shards that hold them.

Owns retries and the search for trajectories that a shard cannot read.
`services.trainer.batches.batch_source` decides what happens to their groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from forge.core.errors import DataLoss, ForgeError, NotFound
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.rpc.chunks import Joiner, batched
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.streams import flowing
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2, scheduler_pb2

_CALL_S = 30.0
_SILENCE_S = 30.0
"""Longest pause in the middle of a fetch; a long fetch has no other deadline."""
_TOGETHER = 4096
"""Most trajectories of one request: its ids then have 0.9 MiB at most."""


Find = Callable[[str], Awaitable[Any]]
"""Returns the stub of a pool shard. Raises `Unavailable` if there is none."""


def shard_in(pool: Remote[Any]) -> Find:
    """Finds shards in discovery."""

    async def find(shard: str) -> Any:
        _, stub = await pool.pick(
            where=lambda instance: instance.metadata.get("shard") == shard, timeout_s=_CALL_S
        )
        return stub

    return find


def addresses_in(pool: Remote[Any]) -> Callable[[str], Awaitable[tuple[str, ...]]]:
    """Returns the addresses of a shard in discovery. Raises `Unavailable` if there are none."""
    find = shard_in(pool)

    async def addresses(shard: str) -> tuple[str, ...]:
        await find(shard)
        instances = pool.instances()
        return tuple(one.address for one in instances if one.metadata.get("shard") == shard)

    return addresses


class Unreadable(Exception):
    """Trajectories that the pool cannot read: the error of each, by id."""

    def __init__(self, lost: Mapping[str, str]) -> None:
        super().__init__(next(iter(lost.values())))
        self.lost = lost

    def groups_among(self, groups: Sequence[scheduler_pb2.BatchGroup]) -> list[str]:
        """Task ids of the groups that have a lost trajectory."""
        return [
            group.group.task.task_id
            for group in groups
            if any(trajectory_id in self.lost for trajectory_id in sealed_ids(group))
        ]


class TrajectoryFetch:
    """Reads sealed trajectories, with a stream to each pool shard."""

    def __init__(self, find: Find, *, patience_s: float) -> None:
        """`patience_s` is the longest wait for an unreachable shard."""
        self._find = find
        self._patience_s = patience_s

    async def fetch(
        self, groups: Sequence[scheduler_pb2.BatchGroup]
    ) -> list[list[common_pb2.Trajectory]]:
        """The sealed trajectories of each group. Raises `Unreadable`, and the error of a shard that
        does not answer."""
        wanted: dict[str, list[str]] = {}
        for group in groups:
            wanted.setdefault(group.group.pool_shard, []).extend(sealed_ids(group))
        lost: dict[str, str] = {}
        shards = await asyncio.gather(
            *(self.fetch_shard(shard, ids, lost) for shard, ids in wanted.items())
        )
        if lost:
            raise Unreadable(lost)
        found = {key: value for shard in shards for key, value in shard.items()}
        return [[found[trajectory_id] for trajectory_id in sealed_ids(group)] for group in groups]

    async def fetch_shard(
        self, shard: str, trajectory_ids: Sequence[str], lost: dict[str, str]
    ) -> dict[str, common_pb2.Trajectory]:
        """Fetch all trajectories of one shard, `_TOGETHER` in a stream, with a new stream after
        each failure for those still missing.

        Unreadable trajectories are entered in `lost`; the others are fetched nevertheless.
        """
        found: dict[str, common_pb2.Trajectory] = {}
        for part in batched(trajectory_ids, _TOGETHER):
            await self._fetch_part(shard, part, found, lost)
        return found

    async def _fetch_part(
        self,
        shard: str,
        trajectory_ids: Sequence[str],
        found: dict[str, common_pb2.Trajectory],
        lost: dict[str, str],
    ) -> None:
        together = len(trajectory_ids)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._patience_s
        backoff = Backoff(0.1, 5.0)
        while missing := [i for i in trajectory_ids if i not in found and i not in lost]:
            asked = missing[:together]
            together = len(trajectory_ids)
            try:
                await self._stream(shard, asked, found)
            except (NotFound, DataLoss) as error:
                if len(asked) == 1:
                    lost[asked[0]] = str(error)
                else:
                    # One bad trajectory fails the whole page: fetch them one by one to find it.
                    together = 1
            except ForgeError as error:
                if not error.retryable or loop.time() > give_up_s:
                    raise
                log.warning("fetch_retried", shard=shard, error=str(error))
                await asyncio.sleep(backoff.next_s())

    async def _stream(
        self, shard: str, trajectory_ids: Sequence[str], found: dict[str, common_pb2.Trajectory]
    ) -> None:
        stub = await self._find(shard)
        request = pool_pb2.FetchTrajectoriesRequest(trajectory_ids=trajectory_ids)
        joiner = Joiner()
        # The stub's own type knows only blocking streams.
        stream: Any = stub.FetchTrajectories(request)
        async for response in flowing(stream, silence_s=_SILENCE_S, source=f"pool shard {shard}"):
            whole = joiner.add(response.trajectory)
            if whole is not None:
                found[response.trajectory_id] = common_pb2.Trajectory.FromString(whole)


def sealed_ids(group: scheduler_pb2.BatchGroup) -> list[str]:
    """The ids of a group's sealed trajectories, in rollout order."""
    return [
        summary.trajectory_id
        for summary in group.trajectories
        if summary.state == common_pb2.TRAJECTORY_STATE_SEALED
    ]
