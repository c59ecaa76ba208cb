"""Erasure of trajectories by task, user or tag: first the records, then their bytes in the files.

Owns the order. `erasure_ledger` remembers the erasure, `data.removal.task_erasure` deletes records,
`maintenance.purge` rewrites an instance's file.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial

from forge.runtime.rpc.server import current_claims
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2
from services.pool import validation
from services.pool.actors.writer import WriterRef
from services.pool.data.removal.task_erasure import tasks_with
from services.pool.erasure_ledger import ErasureLedger, LedgerEntry, erase_tasks, note
from services.pool.maintenance.purge import Purger
from services.pool.readers import ReaderRef
from services.pool.store import PoolStore

FileOf = Callable[[], Awaitable[pool_pb2.EraseTrajectoriesResponse.Replica]]


@dataclass(eq=False, slots=True)
class Erasure:
    """Erases trajectories of the shard that this instance serves."""

    store: PoolStore
    writer: WriterRef
    readers: ReaderRef
    purger: Purger
    ledger: ErasureLedger
    _: KW_ONLY
    purge_follower: FileOf | None
    """None for a shard without replicas."""

    async def run(
        self, request: pool_pb2.EraseTrajectoriesRequest
    ) -> pool_pb2.EraseTrajectoriesResponse:
        """Erases the selected tasks. Raises `InvalidArgument` and `Unavailable`."""
        validation.check_erase(request)
        request.erasure_id = request.erasure_id or uuid.uuid4().hex
        entry = LedgerEntry.of(request, now_unix_s=time.time())
        # The ledger first: an erasure that is begun is completed, after a crash too.
        await self.ledger.record(entry)
        task_ids = list(request.task_ids)
        if not task_ids:
            look = partial(tasks_with, user=request.user, tag=request.tag)
            task_ids = await self.readers.run(partial(self.store.read, look))
        erased = await erase_tasks(self.writer, task_ids)
        await note(self.writer, [entry])
        log.info(
            "trajectories_erased",
            by=current_claims().subject,
            erasure_id=entry.erasure_id,
            pool_shard=self.store.shard,
            groups=erased.groups,
            trajectories=erased.trajectories,
        )
        replicas = [await purged(self.store, self.purger)]
        if self.purge_follower is not None:
            replicas.append(await self.purge_follower())
        return pool_pb2.EraseTrajectoriesResponse(
            pool_shard=self.store.shard,
            groups=erased.groups,
            trajectories=erased.trajectories,
            turns=erased.turns,
            rewards=erased.rewards,
            replicas=replicas,
        )


async def purged(store: PoolStore, purger: Purger) -> pool_pb2.EraseTrajectoriesResponse.Replica:
    """The file of this instance after a purge."""
    return pool_pb2.EraseTrajectoriesResponse.Replica(
        data_dir=str(store.directory.resolve()), pending=await purger.pending()
    )
