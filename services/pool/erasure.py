"""Erasure of trajectories by task, user or tag: first the records, then their bytes in the files.

Owns the order. `data.erasing` deletes records, `maintenance.purge` rewrites an instance's file.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

from forge.runtime.rpc.server import current_claims
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2
from services.pool import validation
from services.pool.actors.writer import WriterRef
from services.pool.data.commands import EraseTasks
from services.pool.data.erasing import Erased, tasks_with
from services.pool.maintenance.purge import Purger
from services.pool.readers import ReaderRef
from services.pool.store import PoolStore

MAX_RECORDS = 128
"""Most turns and rewards deleted in one transaction."""
BATCH = 16
"""Most tasks in one transaction."""
_ERASE_S = 60.0

FileOf = Callable[[], Awaitable[pool_pb2.EraseTrajectoriesResponse.Replica]]


class Erasure:
    """Erases trajectories of the shard that this instance serves."""

    def __init__(
        self,
        store: PoolStore,
        writer: WriterRef,
        readers: ReaderRef,
        purger: Purger,
        *,
        purge_follower: FileOf | None,
    ) -> None:
        """`purge_follower`: None for a shard without replicas."""
        self._store = store
        self._writer = writer
        self._readers = readers
        self._purger = purger
        self._purge_follower = purge_follower

    async def run(
        self, request: pool_pb2.EraseTrajectoriesRequest
    ) -> pool_pb2.EraseTrajectoriesResponse:
        """Erases the selected tasks. Raises `InvalidArgument`."""
        validation.check_erase(request)
        task_ids = list(request.task_ids)
        if not task_ids:
            look = partial(tasks_with, user=request.user, tag=request.tag)
            task_ids = await self._readers.run(partial(self._store.read, look))
        erased = Erased()
        for start in range(0, len(task_ids), BATCH):
            erased = erased.plus(await self._erase(task_ids[start : start + BATCH]))
        log.info(
            "trajectories_erased",
            by=current_claims().subject,
            pool_shard=self._store.shard,
            groups=erased.groups,
            trajectories=erased.trajectories,
        )
        replicas = [await purged(self._store, self._purger)]
        if self._purge_follower is not None:
            replicas.append(await self._purge_follower())
        return pool_pb2.EraseTrajectoriesResponse(
            pool_shard=self._store.shard,
            groups=erased.groups,
            trajectories=erased.trajectories,
            turns=erased.turns,
            rewards=erased.rewards,
            replicas=replicas,
        )

    async def _erase(self, task_ids: list[str]) -> Erased:
        total = Erased(unfinished=True)
        while total.unfinished:
            command = EraseTasks(
                task_ids=tuple(task_ids), max_records=MAX_RECORDS, now_unix_s=time.time()
            )
            total = total.plus(await self._writer.ask(command, timeout_s=_ERASE_S))
        return total


async def purged(store: PoolStore, purger: Purger) -> pool_pb2.EraseTrajectoriesResponse.Replica:
    """The file of this instance after a purge."""
    return pool_pb2.EraseTrajectoriesResponse.Replica(
        data_dir=str(store.directory.resolve()), pending=await purger.pending()
    )
