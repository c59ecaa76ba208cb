"""A follower: finds the leader of its shard, applies its steps, confirms commits on disk.

Owns the calling side of `Follow`. Steps that arrive during a commit are applied together in the
next one: one fsync per batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from forge.core.errors import ForgeError, ResourceExhausted, Unavailable
from forge.runtime.concurrency.byte_queue import ByteQueue
from forge.runtime.coordination import Instance
from forge.runtime.rpc.chunks import Joiner
from forge.runtime.rpc.remote import Remote
from forge.runtime.rpc.status import translated
from forge.runtime.telemetry import log
from forge.v1 import replica_pb2 as pb
from services.pool.actors.writer import WriterRef
from services.pool.data.commands import FollowLeader
from services.pool.readers import ReaderThreads
from services.pool.storage.journal import follower_state, replica_state
from services.pool.storage.records import Records
from services.pool.store import PoolStore

if TYPE_CHECKING:
    from forge.v1.replica_pb2_grpc import PoolReplicaServiceAsyncStub

BATCH_BYTES = 8 << 20
WINDOW_BYTES = 16 << 20
"""Most bytes that wait for the disk; then the stream is not read: backpressure."""
RETRY_S = 0.3
REFUSED_S = 5.0
"""Pause after a refusal that needs an operator."""
_FIND_S = 60.0
_COMMIT_S = 60.0
_STREAM_ENDED = "the leader ended the stream"


class Following:
    """The follower of one shard."""

    def __init__(
        self,
        store: PoolStore,
        writer: WriterRef,
        readers: ReaderThreads,
        leaders: Remote[PoolReplicaServiceAsyncStub],
        *,
        instance_id: str,
        own_address: Callable[[], Awaitable[str]],
    ) -> None:
        """`own_address`: where this instance answers the leader's FetchRecords."""
        self._store = store
        self._writer = writer
        self._readers = readers
        self._leaders = leaders
        self._instance_id = instance_id
        self._own_address = own_address
        self._no_room = ""
        """Reason why the last steps are not on disk, if there was no room."""

    async def run(self) -> None:
        """Follows the current leader until cancelled."""
        while True:
            pause_s = REFUSED_S if self._no_room else RETRY_S
            try:
                await self._follow_leader()
            except* ForgeError as group:
                for error in group.exceptions:
                    passing = isinstance(error, ForgeError) and error.retryable
                    pause_s = pause_s if passing else REFUSED_S
                    (log.info if passing else log.error)(
                        "follows_no_more", pool_shard=self._store.shard, error=str(error)
                    )
            await asyncio.sleep(pause_s)

    async def _follow_leader(self) -> None:
        leader, stub = await self.leader()
        log.info("follower_started", pool_shard=self._store.shard, leader=leader.instance_id)
        state = await self._readers.run(lambda: self._store.read(self._state))
        state.address = await self._own_address()
        stream: Any = stub.Follow()
        try:
            await _write(stream, pb.FollowRequest(state=state))
            inbox = ByteQueue[pb.FollowStep](WINDOW_BYTES)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_receive(stream, inbox))
                tasks.create_task(self._take(stream, inbox))
        finally:
            stream.cancel()

    def _state(self, records: Records) -> pb.FollowerState:
        found = follower_state(records, shard=self._store.shard)
        found.newest_term = max((term for term, _ in replica_state(records).terms), default=0)
        found.no_room = self._no_room
        return found

    async def leader(self) -> tuple[Instance, PoolReplicaServiceAsyncStub]:
        """Raises `Unavailable` if none is found in time."""
        return await self._leaders.pick(where=self._leads, timeout_s=_FIND_S)

    def _leads(self, instance: Instance) -> bool:
        return (
            instance.metadata.get("shard") == self._store.shard
            and instance.instance_id != self._instance_id
        )

    async def _take(self, stream: Any, inbox: ByteQueue[pb.FollowStep]) -> None:
        while True:
            await inbox.until_filled()
            steps = inbox.take(max_bytes=BATCH_BYTES)
            try:
                position: int = await self._writer.ask(
                    FollowLeader(steps=tuple(steps)), timeout_s=_COMMIT_S
                )
            except ResourceExhausted as error:
                self._no_room = str(error)
                raise
            self._no_room = ""
            if position:
                await _write(stream, pb.FollowRequest(durable_position=position))


async def _receive(stream: Any, inbox: ByteQueue[pb.FollowStep]) -> None:
    joiner = Joiner()
    while True:
        async with translated():
            response = await stream.read()
        if not isinstance(response, pb.FollowResponse):
            raise Unavailable(_STREAM_ENDED)
        whole = joiner.add(response.step)
        if whole is not None:
            await inbox.until_room()
            inbox.put(pb.FollowStep.FromString(whole), len(whole))


async def _write(stream: Any, request: pb.FollowRequest) -> None:
    try:
        async with translated():
            await stream.write(request)
    except asyncio.InvalidStateError:
        # What grpc says when the call has ended but its status was not read yet.
        raise Unavailable(_STREAM_ENDED) from None
