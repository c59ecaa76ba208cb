"""The ledger of erasures: what each store must have erased, also one that returns from a backup.

    pool/erasures/<id>    in etcd, written before the first record goes
    the same entry        in each store that has applied it

Owns the entries, and their exchange. A store applies the entries that it lacks before it serves,
and while it serves; entries that etcd lost are written there again. No entry has the name of a user
or a tag, only a digest of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from forge.core.errors import ForgeError, InvalidArgument, StaleFence, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.chunks import batched
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2
from services.pool.actors.writer import WriterRef
from services.pool.data.commands import EraseTasks, NoteErasures
from services.pool.data.removal.task_erasure import Erased
from services.pool.readers import ReaderRef
from services.pool.storage.erasures import noted_erasures
from services.pool.storage.groups.group_index import stored_groups
from services.pool.storage.records import Records
from services.pool.store import PoolStore

PREFIX = "pool/erasures/"
MAX_RECORDS = 128
"""Most turns and rewards deleted in one transaction."""
BATCH = 16
"""Most tasks in one transaction."""
FOLLOW_S = 60.0
"""Between two looks into the ledger."""
_WRITE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One erasure; exactly one of the selections is set."""

    erasure_id: str
    task_ids: tuple[str, ...] = ()
    user: str = ""
    """Digest of the user's name."""
    tag: str = ""
    """Digest of the tag."""
    unix_s: float

    @classmethod
    def of(cls, request: pool_pb2.EraseTrajectoriesRequest, *, now_unix_s: float) -> LedgerEntry:
        """The entry of a request that has an id."""
        return cls(
            erasure_id=request.erasure_id,
            task_ids=tuple(request.task_ids),
            user=_digest(request.erasure_id, request.user),
            tag=_digest(request.erasure_id, request.tag),
            unix_s=now_unix_s,
        )

    @classmethod
    def decoded(cls, value: bytes) -> LedgerEntry:
        """Raises ValueError, KeyError or TypeError for another value."""
        stored = json.loads(value)
        return cls(
            erasure_id=stored["erasure_id"],
            task_ids=tuple(stored["task_ids"]),
            user=stored["user"],
            tag=stored["tag"],
            unix_s=stored["unix_s"],
        )

    def encoded(self) -> bytes:
        """The value in etcd and in a store."""
        return json.dumps(asdict(self)).encode()

    def selects(self, *, user: str, tag: str) -> bool:
        """Whether a group with this user and tag is erased."""
        return bool(
            (user and self.user and _digest(self.erasure_id, user) == self.user)
            or (tag and self.tag and _digest(self.erasure_id, tag) == self.tag)
        )


def _digest(erasure_id: str, name: str) -> str:
    if not name:
        return ""
    return hashlib.blake2b(name.encode(), key=erasure_id.encode(), digest_size=16).hexdigest()


def tasks_of(records: Records, entries: Iterable[LedgerEntry]) -> list[str]:
    """Tasks that entries select in a store."""
    named = [task_id for entry in entries for task_id in entry.task_ids]
    by_group = [entry for entry in entries if entry.user or entry.tag]
    if not by_group:
        return named
    return named + [
        group.task.task_id
        for group, _ in stored_groups(records)
        if any(entry.selects(user=group.task.user, tag=group.task.tag) for entry in by_group)
    ]


class ErasureLedger:
    """The entries in etcd."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def record(self, entry: LedgerEntry) -> None:
        """Writes an entry, unless it is there. Raises InvalidArgument for an id that another
        erasure has, and Unavailable."""
        try:
            await self._coordinator.compare_and_swap(
                PREFIX + entry.erasure_id, entry.encoded(), expected_revision=0
            )
        except StaleFence:
            known = await self.read(entry.erasure_id)
            same = known and (known.task_ids, known.user, known.tag)
            if same and same != (entry.task_ids, entry.user, entry.tag):
                raise InvalidArgument(
                    f"erasure_id {entry.erasure_id!r} belongs to an erasure of other tasks"
                ) from None

    async def ids(self) -> frozenset[str]:
        """Raises Unavailable."""
        names = await self._coordinator.names(PREFIX)
        return frozenset(name.removeprefix(PREFIX) for name in names)

    async def read(self, erasure_id: str) -> LedgerEntry | None:
        """None if there is no such entry. Raises Unavailable."""
        stored = await self._coordinator.get(PREFIX + erasure_id)
        if stored is not None:
            # A shard may have the name "erasures", and other keys here.
            with suppress(ValueError, KeyError, TypeError):
                return LedgerEntry.decoded(stored.value)
        return None


class MissedErasures:
    """Applies to a store the entries that it lacks, for example after a restore."""

    def __init__(
        self, store: PoolStore, writer: WriterRef, readers: ReaderRef, ledger: ErasureLedger
    ) -> None:
        self._store = store
        self._writer = writer
        self._readers = readers
        self._ledger = ledger
        self._applying = asyncio.Lock()

    async def follow(self) -> None:
        """Reads the ledger again and again: an erasure may have failed on this shard alone."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await self.apply()
            except Unavailable as error:
                # A follower has nothing to apply, and without etcd there is no new entry.
                log.debug("erasure_ledger_unread", error=str(error))
            except ForgeError as error:
                log.error("erasures_missed", pool_shard=self._store.shard, error=str(error))

    async def apply(self) -> None:
        """Erases the records of missing entries. Raises Unavailable."""
        async with self._applying:
            noted = await self._readers.run(partial(self._store.read, noted_erasures))
            known = await self._ledger.ids()
            for erasure_id in noted.keys() - known:
                await self._ledger.record(LedgerEntry.decoded(noted[erasure_id]))
            found = [await self._ledger.read(name) for name in sorted(known - noted.keys())]
            missing = [entry for entry in found if entry is not None]
            if not missing:
                return
            look = partial(tasks_of, entries=missing)
            task_ids = await self._readers.run(partial(self._store.read, look))
            erased = await erase_tasks(self._writer, task_ids)
            await note(self._writer, missing)
        if erased != Erased():
            log.warning(
                "missed_erasures_applied",
                pool_shard=self._store.shard,
                erasures=len(missing),
                groups=erased.groups,
                trajectories=erased.trajectories,
            )


async def note(writer: WriterRef, entries: Iterable[LedgerEntry]) -> None:
    """Stores that entries are applied."""
    noted: Mapping[str, bytes] = {entry.erasure_id: entry.encoded() for entry in entries}
    await writer.ask(NoteErasures(entries=noted), timeout_s=_WRITE_S)


async def erase_tasks(writer: WriterRef, task_ids: list[str]) -> Erased:
    """Erases tasks in transactions of a bounded size."""
    total = Erased()
    for batch in batched(task_ids, BATCH):
        unfinished = True
        while unfinished:
            command = EraseTasks(
                task_ids=tuple(batch), max_records=MAX_RECORDS, now_unix_s=time.time()
            )
            done: Erased = await writer.ask(command, timeout_s=_WRITE_S)
            total, unfinished = total.plus(done), done.unfinished
    return total
