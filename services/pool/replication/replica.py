"""One of the two instances of a replicated shard: follower until elected, leader until deposed.

    follow    apply the leader's commits; serve no calls
    elected   stop following, then check that this replica has every acknowledged write
    lead      register; acknowledge writes that the follower has on disk too
    deposed   end the process; a fresh one follows

Owns this life cycle, and the gates before writer and readers. `election` decides who leads,
`leader` acts as one, `follower` and `follower_link` are the two ends of the stream.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from forge.client.stored.pool import REFUSAL_KEY
from forge.core.errors import ForgeError, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Leadership
from forge.runtime.process.service import ServiceContext
from forge.runtime.rpc.status import translated
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2, replica_pb2, replica_pb2_grpc
from services.pool.actors.writer import WriterRef
from services.pool.config import PoolConfig
from services.pool.data.commands import FollowLeader
from services.pool.metrics import LEADS
from services.pool.readers import ReaderRef, ReaderThreads
from services.pool.replication.ack_gate import RETRY_S
from services.pool.replication.election import ReplicaElection
from services.pool.replication.follower import Following
from services.pool.replication.leader import Leader
from services.pool.replication.replica_set import ReplicaSet
from services.pool.replication.self_repair import SelfRepair
from services.pool.replication.shard_identity import bind_leader, check_follower
from services.pool.storage.journal import Changes, adopt, replica_state
from services.pool.storage.record_copies import CopiedRecords, answer, fetch_unit
from services.pool.storage.records import DamagedRecord
from services.pool.storage.tables import Key
from services.pool.store import PoolStore

_COMMIT_S = 60.0
_READ_S = 30.0
_PURGE_S = 6 * 3600.0


T = TypeVar("T")


class Replica:
    """One instance of a replicated shard."""

    def __init__(
        self,
        context: ServiceContext,
        store: PoolStore,
        writer: WriterRef,
        readers: ReaderThreads,
        *,
        on_lead: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_lead` is called after the election, before the instance registers."""
        self._context = context
        self._config: PoolConfig = context.config
        self._store = store
        self._writer = writer
        self._readers = readers
        self._on_lead = on_lead
        self._elected: Leadership | None = None
        """The leadership it won, whether or not it leads yet."""
        self._leader: Leader | None = None
        self._self_repair: SelfRepair | None = None
        """Self-repair of a leader; a follower repairs only in its passes."""
        self._task: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Starts to follow and to campaign."""
        loop = asyncio.get_running_loop()

        def on_commit(position: int, changes: Changes) -> None:
            loop.call_soon_threadsafe(self._committed, position, changes)

        await check_follower(self._context.coordinator, self._store)
        await asyncio.to_thread(self._store.count_commits, on_commit)
        self._context.ready = False
        self._task = asyncio.create_task(self._live(), name="replica")

    @property
    def leader(self) -> Leader:
        """Raises `Unavailable` while this instance does not lead."""
        if self._leader is None:
            raise Unavailable(
                f"this instance is a follower of pool shard {self._store.shard}; discovery names "
                "the leader",
                retry_after_s=RETRY_S,
            )
        return self._leader

    async def with_repair(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """The answer of `attempt`, repeated after each damaged record that the follower could
        replace."""
        met: set[Key] = set()
        while True:
            answer = await attempt()
            damage = _damage_in(answer)
            if damage is None or (damage.table, damage.key) in met or self._self_repair is None:
                return answer
            met.add((damage.table, damage.key))
            if not await self._self_repair.repaired(damage):
                return answer

    async def records(self, request: replica_pb2.FetchRecordsRequest) -> bytes:
        """Serialized RecordChanges for FetchRecords."""
        readers = self._readers if self._leader is None else LeadersReaders(self, self._readers)
        look = partial(answer, request=request)
        return await readers.run(partial(self._store.read, look))

    async def purge_follower(self) -> pool_pb2.EraseTrajectoriesResponse.Replica:
        """The follower's file after a purge; a follower that is absent purges when it returns."""
        try:
            address = await self.leader.follower_with((await self._read(replica_state)).position)
            stub: Any = self._context.channels.stub(
                replica_pb2_grpc.PoolReplicaServiceStub, address
            )
            async with translated():
                done = await stub.PurgeErased(replica_pb2.PurgeErasedRequest(), timeout=_PURGE_S)
        except ForgeError as error:
            return pool_pb2.EraseTrajectoriesResponse.Replica(pending=str(error))
        return pool_pb2.EraseTrajectoriesResponse.Replica(
            data_dir=done.data_dir, pending=done.pending
        )

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Held while the answer to a change is pending."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def drain(self) -> None:
        """Waits until the follower has confirmed pending changes, then ends its link."""
        await self._idle.wait()
        if self._leader is not None:
            await self._leader.close()

    async def stop(self) -> None:
        """Resigns, so that the other replica can lead at once."""
        tasks = {task for task in (self._task, self._announcing) if task is not None}
        await cancel_and_wait(*tasks)
        leadership = self._elected
        if self._leader is not None:
            await self._leader.close()
            # It may have lost its lease meanwhile, and been elected again.
            leadership = self._leader.leadership
        if leadership is not None:
            await leadership.resign()

    def _committed(self, position: int, changes: Changes) -> None:
        if self._leader is not None:
            self._leader.committed(position, changes)

    async def _live(self) -> None:
        election = ReplicaElection(
            self._context.coordinator, self._store, self._readers, self._config
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                follower = self._following()
                following = tasks.create_task(follower.run(), name="following")
                verifying = tasks.create_task(self._verify_as_follower(follower), name="verify")
                self._elected, members = await election.win()
                verifying.cancel()
                following.cancel()
            await self._lead(self._elected, members)
        except ForgeError as error:
            log.error("replica_failed", pool_shard=self._store.shard, error=str(error))
        except Exception:
            log.exception("replica_crashed", pool_shard=self._store.shard)
        # A deposed leader's memory and streams may hold unacknowledged writes.
        self._context.stop()

    def _following(self) -> Following:
        return Following(
            self._store,
            self._writer,
            self._readers,
            self._context.remote("pool", replica_pb2_grpc.PoolReplicaServiceStub),
            instance_id=self._config.instance_id,
            own_address=self._context.until_listening,
        )

    async def _verify_as_follower(self, follower: Following) -> None:
        async def fetch(unit: Key, since: int) -> CopiedRecords:
            _, stub = await follower.leader()
            return await self._fetch(stub, unit)

        repair = SelfRepair(self._store, self._writer, self._readers, fetch, leads=False)
        await repair.verify(every_s=self._config.replication.verify_every_s)

    async def _fetch_from_follower(self, unit: Key, since: int) -> CopiedRecords:
        address = await self.leader.follower_with(since)
        stub = self._context.channels.stub(replica_pb2_grpc.PoolReplicaServiceStub, address)
        return await self._fetch(stub, unit)

    async def _fetch(self, stub: Any, unit: Key) -> CopiedRecords:
        lineage = await self._readers.run(self._store.lineage)
        return await fetch_unit(stub, shard=self._store.shard, lineage=lineage, unit=unit)

    async def _lead(self, leadership: Leadership, members: ReplicaSet) -> None:
        # Commits taken as a follower are on disk first.
        await self._writer.ask(FollowLeader(steps=()), timeout_s=_COMMIT_S)
        if (await self._read(replica_state)).copying:
            raise Unavailable("a leader began to copy to it during its election")
        await bind_leader(self._context.coordinator, self._store, self._config)
        change = partial(adopt, lineage=members.lineage, term=leadership.fence)
        state = await asyncio.to_thread(self._store.write, change)
        leader = Leader(
            self._config,
            self._context.coordinator,
            leadership,
            members,
            self._store,
            self._readers,
            state=state,
            on_change=self._announce,
        )
        self._self_repair = SelfRepair(
            self._store, self._writer, self._readers, self._fetch_from_follower, leads=True
        )
        self._leader = leader
        await leader.begin()
        LEADS.set(1)
        log.info("leader_started", pool_shard=self._store.shard, fence=leadership.fence)
        await self._on_lead()
        self._context.set_ready()
        verify = self._self_repair.verify(every_s=self._config.replication.verify_every_s)
        verifying = asyncio.create_task(verify, name="verify")
        try:
            await leader.hold()
        finally:
            await cancel_and_wait(verifying)
        log.error("deposed", pool_shard=self._store.shard, fence=leadership.fence)

    def _announce(self) -> None:
        assert self._leader is not None, "only a leader has a gate"
        shown = {
            "copies": str(self._leader.copies),
            "lineage": self._leader.members.lineage,
            REFUSAL_KEY: self._leader.refusal,
        }
        if shown.items() <= self._context.metadata.items():
            return
        self._context.metadata.update(shown)
        self._announcing = asyncio.create_task(self._context.announce())

    async def _read(self, look: Callable[[Any], T]) -> T:
        return await self._readers.run(partial(self._store.read, look))


class LeadersWriter:
    """The writer behind the gate: answers once both replicas have the change on disk."""

    def __init__(self, replica: Replica, writer: WriterRef) -> None:
        self._replica = replica
        self._writer = writer

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        """As the writer's; repairs damaged records first. Raises `Unavailable` on a follower."""
        leader = self._replica.leader
        leader.admit()
        give_up_s = time.monotonic() + timeout_s
        with self._replica.answering():

            async def attempt() -> Any:
                left_s = max(0.0, give_up_s - time.monotonic())
                return await _answer_or_error(self._writer.ask(message, timeout_s=left_s))

            answer = await self._replica.with_repair(attempt)
            # A refusal, too, may depend on unconfirmed commits.
            await leader.gate.passed(timeout_s=max(0.0, give_up_s - time.monotonic()))
        if isinstance(answer, ForgeError):
            raise answer
        return answer


class LeadersReaders:
    """The readers behind the gate: a follower shows nothing, a leader only what its follower has
    too."""

    def __init__(self, replica: Replica, readers: ReaderRef) -> None:
        self._replica = replica
        self._readers = readers

    async def run(self, read: Callable[[], T]) -> T:
        """As the readers'; repairs damaged records first. Raises `Unavailable` on a follower."""
        leader = self._replica.leader
        found = await self._replica.with_repair(lambda: _answer_or_error(self._readers.run(read)))
        if isinstance(found, ForgeError):
            raise found
        if leader.gate.required:
            await leader.gate.passed(timeout_s=_READ_S)
        leader.check_readable()
        return cast(T, found)


async def _answer_or_error(answer: Awaitable[T]) -> T | ForgeError:
    try:
        return await answer
    except ForgeError as error:
        return error


def _damage_in(answer: Any) -> DamagedRecord | None:
    """The first damaged record of an answer; turns have an answer each."""
    answers = answer if isinstance(answer, tuple) else (answer,)
    return next((one for one in answers if isinstance(one, DamagedRecord)), None)
