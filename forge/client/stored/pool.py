"""Reads of a running pool: all its shards as one.

Owns pages, retries and resumption. Each shard is found through etcd, so calls survive its restart.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any

from forge.client.retry import Patience
from forge.core.errors import DataLoss, ForgeError, InvalidArgument, NotFound
from forge.core.trajectory import parse_trajectory_id
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Coordinator, Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.runtime.rpc.streams import flowing
from forge.v1 import common_pb2, pool_pb2
from forge.v1.pool_pb2_grpc import PoolServiceStub

CALL_S = 60.0
FIND_S = 3.0
FETCH_TRAJECTORIES = 16
"""Most trajectories in one call."""
COMPACT_S = 6 * 3600.0
REFUSAL_KEY = "refuses_writes"
"""Metadata of a replicated shard: why it refuses changes; "" if it accepts them."""
NO_ROOM_KEY = "refuses_turns"
"""Metadata of a shard: why it refuses turns for lack of room; "" if it accepts them."""
TAIL_BUFFER = 64
"""Most responses that wait for the caller, over all shards; beyond it streams are not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Trajectories of one shard that match a query; may be empty."""

    shard: str
    trajectories: Sequence[common_pb2.TrajectorySummary]
    damaged: Sequence[str] = ()
    """Ids of trajectories that cannot be read: it is unknown whether they match."""


class PoolReader:
    """Reads every registered shard."""

    def __init__(
        self, coordinator: Coordinator, channels: Channels, *, retry_for_s: float = 30.0
    ) -> None:
        self._retry_for_s = retry_for_s
        self._pool = Remote(coordinator, channels, kind="pool", stub=PoolServiceStub)

    async def shards(self) -> list[str]:
        """Return the names of the registered shards. Raises `Unavailable` if there is none."""
        await self._pool.pick(timeout_s=FIND_S)
        return sorted({instance.metadata["shard"] for instance in self._pool.instances()})

    def copies_in_sync(self, shard: str) -> int:
        """Return how many connected replicas have every acknowledged write; 0 if unreplicated."""
        found = (one.metadata for one in self._pool.instances() if _serves(one, shard))
        return max((int(metadata.get("copies", 0)) for metadata in found), default=0)

    def refusals(self, shard: str) -> list[str]:
        """Return why a shard refuses changes, with the remedies."""
        found = (one.metadata for one in self._pool.instances() if _serves(one, shard))
        return [f"{text}. {remedy}" for one in found for text, remedy in refusals(one)]

    async def stats(self, shard: str) -> pool_pb2.GetPoolStatsResponse:
        """Return counts and sizes of one shard, also by domain and state."""
        request = pool_pb2.GetPoolStatsRequest(by_domain=True)
        stats: pool_pb2.GetPoolStatsResponse = await self._call(shard, "GetPoolStats", request)
        return stats

    async def sizes(self, shard: str) -> pool_pb2.GetPoolStatsResponse:
        """Return counts and sizes of one shard as a whole; costs it nothing."""
        request = pool_pb2.GetPoolStatsRequest()
        stats: pool_pb2.GetPoolStatsResponse = await self._call(
            shard, "GetPoolStats", request, timeout_s=FIND_S
        )
        return stats

    async def query(
        self, wanted: pool_pb2.TrajectoryFilter, *, page_size: int = 0
    ) -> AsyncIterator[Page]:
        """Yields the trajectories that match `wanted`, shard by shard; pages may be empty."""
        for shard in await self.shards():
            async for page in self._pages(shard, wanted, page_size):
                yield page

    async def search(
        self,
        wanted: pool_pb2.TrajectoryFilter,
        text: str,
        *,
        page_size: int = 0,
        start: tuple[str, str] = ("", ""),
    ) -> AsyncIterator[tuple[str, pool_pb2.SearchTrajectoriesResponse]]:
        """Yields the trajectories that match `wanted` and have a text in a message, shard by shard:
        pages with the name of their shard; they may be empty. `start`: a shard, and the
        `next_page_token` of its last page that was read; "" there: continue with the next shard."""
        first, token = start
        shards = await self.shards()
        if first:
            shards = [one for one in shards if one > first or (token and one == first)]
        for shard in shards:
            token = token if shard == first else ""
            while True:
                request = pool_pb2.SearchTrajectoriesRequest(
                    filter=wanted, text=text, page_size=page_size, page_token=token
                )
                page: pool_pb2.SearchTrajectoriesResponse = await self._call(
                    shard, "SearchTrajectories", request
                )
                yield shard, page
                token = page.next_page_token
                if not token:
                    break

    async def group(self, shard: str, task_id: str, wanted: pool_pb2.TrajectoryFilter) -> Page:
        """Return the trajectories of one task on its shard that match `wanted`."""
        of_task = pool_pb2.TrajectoryFilter()
        of_task.CopyFrom(wanted)
        of_task.task_ids[:] = [task_id]
        found: list[common_pb2.TrajectorySummary] = []
        damaged: list[str] = []
        async for page in self._pages(shard, of_task, 0):
            found += page.trajectories
            damaged += page.damaged
        return Page(shard=shard, trajectories=found, damaged=damaged)

    async def _pages(
        self, shard: str, wanted: pool_pb2.TrajectoryFilter, page_size: int
    ) -> AsyncIterator[Page]:
        token = ""
        while True:
            request = pool_pb2.QueryTrajectoriesRequest(
                filter=wanted, page_size=page_size, page_token=token
            )
            page: pool_pb2.QueryTrajectoriesResponse = await self._call(
                shard, "QueryTrajectories", request
            )
            yield Page(
                shard=shard,
                trajectories=page.trajectories,
                damaged=page.damaged_trajectory_ids,
            )
            token = page.next_page_token
            if not token:
                break

    async def fetch(
        self, shard: str, trajectory_ids: Sequence[str], *, on_damage: Callable[[str], None]
    ) -> AsyncIterator[common_pb2.Trajectory]:
        """Yields whole trajectories in the given order, one in memory at a time. Leaves out freed
        ones, and damaged ones, whose ids go to `on_damage`."""
        left = list(trajectory_ids)
        patience = self._patience()
        size = FETCH_TRAJECTORIES
        while left:
            try:
                async with aclosing(self._fetch(shard, left[:size])) as found:
                    async for trajectory in found:
                        del left[0]
                        patience = self._patience()
                        yield trajectory
            except (NotFound, DataLoss) as error:
                # Fetch one by one, to find the damaged one.
                if size == 1:
                    trajectory_id = left.pop(0)
                    if isinstance(error, DataLoss):
                        on_damage(trajectory_id)
                size = FETCH_TRAJECTORIES if size == 1 else 1
            except ForgeError as error:
                await asyncio.sleep(patience.pause_s(error))

    async def summaries(self, trajectory_ids: Sequence[str]) -> list[common_pb2.TrajectorySummary]:
        """Return the summaries of the known ones of these trajectories, on any shard."""
        request = pool_pb2.GetSummariesRequest(trajectory_ids=trajectory_ids)
        found: list[common_pb2.TrajectorySummary] = []
        for shard in await self.shards():
            found += (await self._call(shard, "GetSummaries", request)).summaries
        return found

    async def find(self, trajectory_id: str) -> common_pb2.Trajectory:
        """Return one whole trajectory of any shard. Raises `InvalidArgument` for a malformed id,
        `NotFound`, also for a freed one, and `DataLoss` for a damaged one."""
        parse_trajectory_id(trajectory_id)
        damaged: list[str] = []
        for shard in await self.shards():
            found = self.fetch(shard, [trajectory_id], on_damage=damaged.append)
            async for trajectory in found:
                return trajectory
        if damaged:
            raise DataLoss(f"{trajectory_id} is damaged: `forge pool check --repair` mends a shard")
        raise NotFound(f"no pool shard has the turns of {trajectory_id}: unknown, or freed")

    async def tail(
        self,
        wanted: pool_pb2.TrajectoryFilter,
        *,
        cursors: Mapping[str, str],
        from_start: bool = False,
    ) -> AsyncIterator[pool_pb2.TailTrajectoriesResponse]:
        """Yields the closes and rewards of every shard, from its cursor or from now on, without
        end. Raises the error of a shard that refuses or stays unreachable."""
        shards = await self.shards()
        for shard in cursors:
            if shard not in shards:
                raise InvalidArgument(
                    f"cursor {cursors[shard]} is of pool shard {shard!r}, which is not registered; "
                    f"there are {', '.join(shards)}"
                )
        responses: asyncio.Queue[pool_pb2.TailTrajectoriesResponse | ForgeError] = asyncio.Queue(
            TAIL_BUFFER
        )
        tails = [
            asyncio.create_task(
                self._tail(shard, wanted, cursors.get(shard, ""), from_start, responses)
            )
            for shard in shards
        ]
        try:
            while True:
                response = await responses.get()
                if isinstance(response, ForgeError):
                    raise response
                yield response
        finally:
            await cancel_and_wait(*tails)

    async def compact(
        self, shard: str, *, data_dir: str = ""
    ) -> AsyncGenerator[pool_pb2.CompactShardResponse]:
        """Compacts a served shard and yields the progress; closing the generator gives up.
        `data_dir`: the directory it must be in."""
        stub = await self._find(shard)
        request = pool_pb2.CompactShardRequest(data_dir=data_dir)
        async with translated():
            async for response in stub.CompactShard(request, timeout=COMPACT_S):
                yield response

    async def erase(
        self, request: pool_pb2.EraseTrajectoriesRequest
    ) -> AsyncIterator[pool_pb2.EraseTrajectoriesResponse]:
        """Erases on every registered shard, one after another."""
        # One entry in the ledger for all shards.
        request.erasure_id = request.erasure_id or uuid.uuid4().hex
        for shard in await self.shards():
            response: pool_pb2.EraseTrajectoriesResponse = await self._call(
                shard, "EraseTrajectories", request, timeout_s=COMPACT_S
            )
            yield response

    async def _tail(
        self,
        shard: str,
        wanted: pool_pb2.TrajectoryFilter,
        cursor: str,
        from_start: bool,
        responses: asyncio.Queue[pool_pb2.TailTrajectoriesResponse | ForgeError],
    ) -> None:
        patience = self._patience()
        while True:
            request = pool_pb2.TailTrajectoriesRequest(
                filter=wanted, cursor=cursor, from_start=from_start
            )
            try:
                stub = await self._find(shard)
                async with translated():
                    async for response in stub.TailTrajectories(request):
                        cursor = response.cursor
                        patience = self._patience()
                        await responses.put(response)
            except ForgeError as error:
                try:
                    await asyncio.sleep(patience.pause_s(error))
                except ForgeError as last:
                    await responses.put(last)
                    return

    async def _fetch(
        self, shard: str, trajectory_ids: Sequence[str]
    ) -> AsyncGenerator[common_pb2.Trajectory, None]:
        stub = await self._find(shard)
        request = pool_pb2.FetchTrajectoriesRequest(trajectory_ids=trajectory_ids)
        joiner = Joiner()
        pieces = flowing(
            stub.FetchTrajectories(request), silence_s=CALL_S, source=f"pool shard {shard}"
        )
        async for piece in pieces:
            whole = joiner.add(piece.trajectory)
            if whole is not None:
                yield common_pb2.Trajectory.FromString(whole)

    # Any: the type of the stub has blocking streams only.
    async def _find(self, shard: str) -> Any:
        _, stub = await self._pool.pick(where=lambda one: _serves(one, shard), timeout_s=FIND_S)
        return stub

    async def _call(
        self, shard: str, method: str, request: Any, *, timeout_s: float = CALL_S
    ) -> Any:
        return await self._pool.call(
            method,
            request,
            timeout_s=timeout_s,
            retry_for_s=self._retry_for_s,
            where=lambda one: _serves(one, shard),
        )

    def _patience(self) -> Patience:
        return Patience(self._retry_for_s, clock=time.monotonic, rng=Random())


def refusals(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields each refusal of changes that a shard announces in its metadata, with the remedy."""
    shard = f"pool shard {metadata.get('shard', '')}"
    if reason := metadata.get(REFUSAL_KEY):
        yield (
            f"{shard} refuses writes, so no rollout ends and no step is trained: {reason}",
            "Start its other replica, or free space on that one's disk, or replace it: "
            "docs/runbooks/pool_host_lost.md.",
        )
    if reason := metadata.get(NO_ROOM_KEY):
        yield (
            f"{shard} refuses turns, so its rollouts wait: {reason}",
            "Free space on its disk; meanwhile retention frees settled groups: "
            "docs/pool_retention.md, A full disk.",
        )


def _serves(instance: Instance, shard: str) -> bool:
    return instance.metadata.get("shard") == shard
