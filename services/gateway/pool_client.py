"""Client of the pool shards: reads trajectories, adds rewards, seals.

Owns the RPCs and their retries; all of them are idempotent. `actors.shard_writer` appends turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from forge.core.errors import FailedPrecondition, NotFound, Unavailable
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, pool_pb2
from services.gateway.actors.shard_writer import AppendStream

if TYPE_CHECKING:
    from forge.runtime.coordination import Instance
    from forge.v1.pool_pb2_grpc import PoolServiceAsyncStub

GLANCE_TIMEOUT_S = 5.0
"""Deadline of an optional read while an agent waits."""


class Pool:
    """The pool shards, found by name."""

    def __init__(
        self,
        remote: Remote[PoolServiceAsyncStub],
        *,
        timeout_s: float,
        wait_s: float,
        gone: Callable[[str], Awaitable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wait_s` as the setting `pool_wait_s`; `gone` returns the reason if a shard was retired
        or declared lost, else ""; `clock` returns monotonic seconds."""
        self._remote = remote
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._gone = gone
        self._clock = clock
        self._served: dict[str, float] = {}
        """By shard: the time of the latest call that found an instance."""

    async def stored(self, claims: Claims) -> int:
        """Returns the number of stored turns of the session's trajectory, without retries."""
        timeout_s = min(self._timeout_s, GLANCE_TIMEOUT_S)
        summaries = await self._summaries(claims, timeout_s=timeout_s, retry_for_s=0.0)
        return sum(summary.turns for summary in summaries)

    async def fetch(self, claims: Claims) -> common_pb2.Trajectory | None:
        """Returns the stored trajectory of the session; None if no turn is stored."""
        summaries = await self._summaries(claims)
        if not summaries:
            return None
        is_open = summaries[0].state == common_pb2.TRAJECTORY_STATE_OPEN
        # The copy on a shard that retires lacks later rewards.
        pool_shard = claims.pool_shard if is_open else await self._present_shard(claims)
        joiner = Joiner()
        async with translated():
            _, stub = await self._remote.pick(where=_shard(pool_shard), timeout_s=self._timeout_s)
            request = pool_pb2.FetchTrajectoriesRequest(trajectory_ids=[claims.trajectory_id])
            async for response in stub.FetchTrajectories(request, timeout=self._timeout_s):
                trajectory = joiner.add(response.trajectory)
                if trajectory is not None:
                    return common_pb2.Trajectory.FromString(trajectory)
        raise NotFound(f"pool shard {pool_shard} sent no turns of {claims.trajectory_id}")

    async def _summaries(
        self, claims: Claims, **times: float
    ) -> Sequence[common_pb2.TrajectorySummary]:
        """Returns one summary, or none if no turn is stored."""
        request = pool_pb2.GetSummariesRequest(trajectory_ids=[claims.trajectory_id])
        response: pool_pb2.GetSummariesResponse = await self._call(
            claims.pool_shard, "GetSummaries", request, **times
        )
        return response.summaries

    async def annotate(self, claims: Claims, rewards: Iterable[common_pb2.RewardEvent]) -> None:
        """Adds reward components to the session's trajectory."""
        request = pool_pb2.AppendRewardsRequest(trajectory_id=claims.trajectory_id, rewards=rewards)
        await self._call_moved(claims, "AppendRewards", request)

    async def seal(
        self,
        claims: Claims,
        *,
        turns: int,
        rewards: Iterable[common_pb2.RewardEvent],
        abandon_reason: str,
        closing_agent_s: float | None,
    ) -> common_pb2.TrajectorySummary:
        """Seals or abandons the session's trajectory."""
        state = (
            common_pb2.TRAJECTORY_STATE_ABANDONED
            if abandon_reason
            else common_pb2.TRAJECTORY_STATE_SEALED
        )
        request = pool_pb2.SealTrajectoryRequest(
            trajectory_id=claims.trajectory_id,
            task_id=claims.task_id,
            domain=claims.domain,
            turns=turns,
            rewards=rewards,
            state=state,
            reason=abandon_reason,
            closing_agent_s=closing_agent_s,
        )
        response: pool_pb2.SealTrajectoryResponse = await self._call_moved(
            claims, "SealTrajectory", request
        )
        return response.summary

    async def open_append_stream(self, pool_shard: str) -> AppendStream:
        """Opens a stream for turns. It has no deadline and lives as long as both sides. Raises
        `Unavailable`, `FailedPrecondition` for a shard that was retired or declared lost."""
        return cast(AppendStream, (await self._pick(pool_shard, self._timeout_s)).AppendTurns())

    async def _call_moved(self, claims: Claims, method: str, request: Any) -> Any:
        """Calls the session's shard, and then the present one if the group has moved."""
        try:
            return await self._call(claims.pool_shard, method, request)
        except FailedPrecondition:
            pool_shard = await self._present_shard(claims)
            if pool_shard == claims.pool_shard:
                raise
        return await self._call(pool_shard, method, request)

    async def _present_shard(self, claims: Claims) -> str:
        """Returns the shard that has the session's group: another than the session's if that shard
        retires."""
        request = pool_pb2.LookUpGroupsRequest(task_ids=[claims.task_id])
        passed: list[str] = []
        pool_shard = claims.pool_shard
        while pool_shard not in passed:
            passed.append(pool_shard)
            found: pool_pb2.LookUpGroupsResponse = await self._call(
                pool_shard, "LookUpGroups", request
            )
            for group in found.groups:
                if group.state == common_pb2.GROUP_STATE_MOVED:
                    pool_shard = group.reason
        return pool_shard

    async def _call(self, pool_shard: str, method: str, request: Any, **times: float) -> Any:
        """Calls a shard; `times` replaces the deadline and the retry time."""
        limits = {"timeout_s": self._timeout_s, "retry_for_s": self._timeout_s} | times
        await self._wait_for(pool_shard, limits["timeout_s"])
        return await self._remote.call(method, request, where=_shard(pool_shard), **limits)

    async def _wait_for(self, pool_shard: str, timeout_s: float) -> None:
        """Raises `Unavailable` for a shard that no instance serves, `FailedPrecondition` for one
        that is gone: its sessions are over, and another attempt gets the present shard."""
        served_s = self._served.get(pool_shard, -math.inf)
        restarts = self._clock() - served_s < self._timeout_s
        await self._pick(pool_shard, min(timeout_s, self._timeout_s if restarts else self._wait_s))
        self._served[pool_shard] = self._clock()

    async def _pick(self, pool_shard: str, timeout_s: float) -> PoolServiceAsyncStub:
        where = _shard(pool_shard)
        if not any(map(where, self._remote.instances())):
            await self._refuse_gone(pool_shard)
        try:
            _, stub = await self._remote.pick(where=where, timeout_s=timeout_s)
        except Unavailable as error:
            await self._refuse_gone(pool_shard)
            raise Unavailable(f"no instance serves pool shard {pool_shard!r}: {error}") from error
        return stub

    async def _refuse_gone(self, pool_shard: str) -> None:
        reason = ""
        with suppress(Unavailable):
            # Without etcd it counts as absent.
            reason = await self._gone(pool_shard)
        if reason:
            raise FailedPrecondition(f"pool shard {pool_shard} {reason}")


def _shard(pool_shard: str) -> Callable[[Instance], bool]:
    return lambda instance: instance.metadata.get("shard") == pool_shard
