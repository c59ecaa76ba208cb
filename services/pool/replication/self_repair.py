"""Self-repair of a replica: damaged records are replaced by those of the other replica.

Owns when: as soon as a read or a change meets one, and in passes over every record. A record comes
only from a copy with every commit of this one, and is stored only if it is still damaged then, so a
change made meanwhile stays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from typing import TypeVar

from forge.core.errors import ForgeError
from forge.runtime.telemetry import log
from services.pool.actors.writer import WriterRef
from services.pool.data.commands import MendIndex, RepairUnit
from services.pool.data.repair.index_mending import MENDED, wrong_entries
from services.pool.data.repair.record_repair import is_whole
from services.pool.metrics import REPAIRS
from services.pool.readers import ReaderThreads
from services.pool.storage.journal import SENT, replica_state
from services.pool.storage.record_copies import CopiedRecords, units_of
from services.pool.storage.record_names import describe
from services.pool.storage.records import DamagedRecord, Records
from services.pool.storage.tables import CONTENT, Key, Table
from services.pool.store import PoolStore

PAGE = 64
"""Units verified in one snapshot."""
REST = 9
"""A pass sleeps so many times as long as it reads."""
LEFT_S = 60.0
"""Pause before a unit that no copy has is fetched again."""
_COMMIT_S = 60.0

T = TypeVar("T")
FetchSince = Callable[[Key, int], Awaitable[CopiedRecords]]
"""Reads a unit from the other replica, once that has every commit up to a position."""


class SelfRepair:
    """The repair of one replica, as leader or as follower."""

    def __init__(
        self,
        store: PoolStore,
        writer: WriterRef,
        readers: ReaderThreads,
        fetch: FetchSince,
        *,
        leads: bool,
    ) -> None:
        self._store = store
        self._writer = writer
        self._readers = readers
        self._fetch = fetch
        self._leads = leads
        self._repairing = asyncio.Lock()
        self._left: dict[Key, float] = {}
        """Units that no copy has, and when that was found (monotonic)."""

    async def repaired(self, damage: DamagedRecord) -> bool:
        """Whether the damaged record is intact now."""
        units = units_of(damage.table, damage.key)
        return bool(units) and all([await self._repaired(unit) for unit in units])

    async def verify(self, *, every_s: float) -> None:
        """Verifies all records, pass after pass, until cancelled; 0: never."""
        while every_s:
            for table in SENT:
                # Turns and rewards are verified with their trajectory, indexes with their groups.
                if table not in CONTENT and not (self._leads and table in MENDED):
                    await self._verify(table)
            if self._leads:
                await self.mend_indexes()
            await asyncio.sleep(every_s)

    async def _verify(self, table: Table) -> None:
        after = b""
        while True:
            began_s = time.monotonic()
            try:
                look = partial(damaged_units, table=table, after=after)
                damaged, after = await self._read(look)
                for unit in damaged:
                    await self._repaired(unit)
            except ForgeError as error:
                log.warning("verify_delayed", table=table.value, error=str(error))
                return
            if not after:
                return
            await asyncio.sleep(REST * (time.monotonic() - began_s))

    async def mend_indexes(self) -> None:
        """Makes the indexes of tags and labels equal to the records of groups."""
        for table in (Table.GROUPS, *MENDED):
            after = b""
            while True:
                began_s = time.monotonic()
                look = partial(wrong_entries, table=table, after=after, limit=PAGE)
                try:
                    wrong, after = await self._read(look)
                    if wrong:
                        command = MendIndex(entries=tuple(wrong))
                        changed = await self._writer.ask(command, timeout_s=_COMMIT_S)
                        REPAIRS.labels("repaired").inc(changed)
                        log.warning("index_mended", pool_shard=self._store.shard, entries=changed)
                except ForgeError as error:
                    log.warning("verify_delayed", table=table.value, error=str(error))
                    return
                if not after:
                    break
                await asyncio.sleep(REST * (time.monotonic() - began_s))

    async def _repaired(self, unit: Key) -> bool:
        async with self._repairing:
            if await self._read(partial(is_whole, unit=unit)):
                return True
            if time.monotonic() < self._left.get(unit, float("-inf")) + LEFT_S:
                return False
            return await self._replace(unit)

    async def _replace(self, unit: Key) -> bool:
        record = f"{unit[0].value} {describe(*unit)}"
        try:
            since = (await self._read(replica_state)).position
            copy = await self._fetch(unit, since)
            command = RepairUnit(unit=unit, copy=copy, since=since, leads=self._leads)
            whole: bool = await self._writer.ask(command, timeout_s=_COMMIT_S)
        except ForgeError as error:
            log.warning("record_not_repaired", record=record, error=str(error))
            return False
        REPAIRS.labels("repaired" if whole else "left").inc()
        if whole:
            self._left.pop(unit, None)
            log.warning("record_repaired", pool_shard=self._store.shard, record=record)
        else:
            self._left[unit] = time.monotonic()
            log.error("record_lost", pool_shard=self._store.shard, record=record)
        return whole

    async def _read(self, look: Callable[[Records], T]) -> T:
        return await self._readers.run(partial(self._store.read, look))


def damaged_units(records: Records, *, table: Table, after: bytes) -> tuple[list[Key], bytes]:
    """Returns the damaged units after `after`, and the last key read; b"" at the end."""
    if replica_state(records).copying:
        return [], b""  # Of no single moment: what looks damaged may be on its way.
    keys = [key for key, _ in islice(records.scan_checksummed(table, after=after), PAGE)]
    damaged = {
        unit: None for key in keys for unit in units_of(table, key) if not is_whole(records, unit)
    }
    return list(damaged), keys[-1] if len(keys) == PAGE else b""
