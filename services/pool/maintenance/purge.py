"""Removal of erased bytes from the free pages of a served file, as leader and as follower.

LMDB leaves the bytes of deleted records in free pages until it writes these again. After an erasure
the file is therefore rewritten (`compaction`). A replica that was absent, or had no space, does so
once it has the erasure.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial

from forge.core.errors import ForgeError
from forge.runtime.telemetry import log
from services.pool.maintenance.compaction import Compactor
from services.pool.readers import ReaderThreads
from services.pool.storage.erasures import put_purged, unpurged_erasure
from services.pool.store import PoolStore

PERIOD_S = 5.0


class Purger:
    """Purges the file of one instance."""

    def __init__(self, store: PoolStore, readers: ReaderThreads, compactor: Compactor) -> None:
        self.compactor = compactor
        self._store = store
        self._readers = readers
        self._purging = asyncio.Lock()

    async def run(self) -> None:
        """Purges after each erasure, until it is cancelled."""
        failure = ""
        while True:
            pending = await self.pending()
            if pending and pending != failure:
                log.warning("purge_delayed", pool_shard=self._store.shard, error=pending)
            failure = pending
            await asyncio.sleep(PERIOD_S)

    async def pending(self) -> str:
        """Purges; why the file may still have erased bytes, "" if it has none."""
        try:
            async with self._purging:
                await self._purge()
        except ForgeError as error:
            return str(error)
        return ""

    async def _purge(self) -> None:
        # Records that are erased during a compaction are in its copy: compact again.
        while erasure := await self._readers.run(
            partial(self._store.environment.read, unpurged_erasure)
        ):
            async with aclosing(self.compactor.run("", purge=True)) as progress:
                async for _ in progress:
                    pass
            change = partial(put_purged, erasure=erasure)
            # A record of this replica alone, so not a commit.
            await asyncio.to_thread(self._store.environment.write, change)
            log.info("erased_bytes_purged", pool_shard=self._store.shard)
