"""Writes to a pool as the services do, noting what it acknowledges.

Owns no process: whoever kills one asks the account afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from forge.core.errors import FailedPrecondition, ForgeError
from forge.runtime.coordination import Instance
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.v1 import common_pb2, pool_pb2, pool_pb2_grpc
from tests.support.pool.account import (
    TURNS,
    Ledger,
    late_reward_of,
    put_of,
    requests_of,
    seal_of,
    train_of,
    trajectory_of,
    turn_of,
)

FENCE = 2
_CALL_S = 10.0
_RETRY_FOR_S = 300.0
_RETRY_S = 0.1
_PASSING = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
)


class Writer:
    """Writes to one shard: found in the directory, sent again until told."""

    def __init__(
        self, pools: Remote[pool_pb2_grpc.PoolServiceAsyncStub], shard: str, ledger: Ledger
    ) -> None:
        self._pools = pools
        self._where: Callable[[Instance], bool] = lambda one: one.metadata.get("shard") == shard
        self._ledger = ledger

    async def fill(self, names: Iterator[str]) -> None:
        """Groups with a sealed trajectory each, trained on and rewarded late, one after the other,
        until cancelled."""
        for task_id in names:
            await self._call("PutGroups", put_of(task_id, FENCE))
            self._ledger.groups.add(task_id)
            self._ledger.add()
            await self._finish(task_id)

    async def check_fence(self) -> None:
        """Whoever led before the leader that filled it is refused, whichever replica leads."""
        with pytest.raises(FailedPrecondition, match=f"a leader with fence {FENCE} has written"):
            await self._call("PutGroups", put_of("t0", FENCE - 1))

    async def _finish(self, task_id: str) -> None:
        trajectory_id = trajectory_of(task_id)
        await self._append_all(trajectory_id)
        answer = await self._call("SealTrajectory", seal_of(trajectory_id))
        self._ledger.sealed[trajectory_id] = answer.summary
        self._ledger.add()
        await self._call("SetGroupStates", train_of(task_id, FENCE))
        self._ledger.trained.add(task_id)
        self._ledger.add()
        await self._call("AppendRewards", late_reward_of(trajectory_id))
        self._ledger.rewarded.add(trajectory_id)
        self._ledger.add()

    async def _append_all(self, trajectory_id: str) -> None:
        """Again and again what is not acknowledged."""
        while missing := [
            turn_of(trajectory_id, index)
            for index in range(TURNS)
            if (trajectory_id, index) not in self._ledger.turns
        ]:
            try:
                await self._append(missing)
            except ForgeError as error:
                assert error.retryable, error
                # grpc may tell of a cancelled task as of a cancelled call.
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from error
            await asyncio.sleep(_RETRY_S)

    async def _append(self, turns: list[common_pb2.Turn]) -> None:
        async def requests() -> AsyncIterator[pool_pb2.AppendTurnsRequest]:
            for request in requests_of(turns):
                yield request

        _, stub = await self._pools.pick(where=self._where, timeout_s=_CALL_S)
        async with translated():
            async for answer in stub.AppendTurns(requests(), timeout=_CALL_S):
                if answer.status_code == 0:
                    self._ledger.turns.add((turns[0].trajectory_id, answer.sequence))
                    self._ledger.add()
                else:
                    assert answer.status_code in _PASSING, answer.error

    async def _call(self, method: str, request: object) -> Any:
        return await self._pools.call(
            method, request, timeout_s=_CALL_S, retry_for_s=_RETRY_FOR_S, where=self._where
        )
