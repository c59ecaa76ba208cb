"""Wiring of a pool instance: store, writer, readers, servicer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from forge.core.errors import ConfigError, Unavailable
from forge.runtime.coordination import Registration
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2_grpc, replica_pb2_grpc, trainer_pb2_grpc
from services.pool.actors.writer import Writer, WriterRef
from services.pool.config import PoolConfig, RetentionSettings
from services.pool.erasure import Erasure, FileOf
from services.pool.erasure_ledger import ErasureLedger, MissedErasures
from services.pool.group_mover import GroupMover
from services.pool.maintenance.compaction import Compactor
from services.pool.maintenance.purge import Purger
from services.pool.readers import ReaderRef, ReaderThreads
from services.pool.replication.election import serve_alone
from services.pool.replication.replica import LeadersReaders, LeadersWriter, Replica
from services.pool.replication.shard_identity import hold_shard
from services.pool.restored_shard import watch_restored
from services.pool.retention import Retention, RetentionPolicy
from services.pool.room_watch import watch_room
from services.pool.service import (
    AUDITED,
    FULL_NAME,
    REPLICA_FULL_NAME,
    SCOPES,
    PoolReplicaServicer,
    PoolServicer,
    WriteLimits,
)
from services.pool.storage.environment.lmdb_env import OnPanic
from services.pool.store import PoolStore
from services.pool.trainer_status import covered_step, trained_step


class PoolApp:
    """One pool instance, from the open of its store to the close."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._opened = AsyncExitStack()
        self._servicer: PoolServicer | None = None
        self._replica: Replica | None = None
        self._held: Registration | None = None
        """The name of a shard that is served without replicas."""

    async def start(self) -> None:
        """Opens the store and serves it, alone or as a replica."""
        config: PoolConfig = self._context.config
        loop = asyncio.get_running_loop()

        def on_panic(error: Unavailable) -> None:
            loop.call_soon_threadsafe(self._context.fail, "store", error)

        store = await asyncio.to_thread(_open_store, config, on_panic)
        self._opened.push_async_callback(asyncio.to_thread, store.close)
        readers = ReaderThreads(config.store.reader_threads)
        self._opened.push_async_callback(readers.close)
        writer = await self._context.actors.spawn(lambda: Writer(store), name="writer")
        self._context.metadata["shard"] = store.shard
        if config.replicated:
            if not config.shard:
                raise ConfigError(
                    'shard is empty: with replication.durability = "replicated" both instances '
                    "need its name"
                )
            await self._start_replica(store, writer, readers)
        else:
            await serve_alone(self._context.coordinator, store)
            self._held = await hold_shard(
                self._context.coordinator,
                store,
                config,
                on_conflict=lambda error: self._context.fail("shard", error),
            )
            self._context.metadata["lineage"] = store.lineage()
            await self._missed_erasures(store, writer, readers).apply()
            self._serve(store, writer, readers, self._purger(store, readers))
            self._retain(store, writer, readers)
        log.info("shard_opened", shard=store.shard, data_dir=config.data_dir)

    async def _start_replica(
        self, store: PoolStore, writer: WriterRef, readers: ReaderThreads
    ) -> None:
        async def on_lead() -> None:
            await self._missed_erasures(store, writer, readers).apply()
            self._retain(store, leaders_writer, readers)

        replica = Replica(
            self._context,
            store,
            writer,
            readers,
            on_lead=on_lead,
        )
        leaders_writer = LeadersWriter(replica, writer)
        purger = self._purger(store, readers)
        leaders_readers = LeadersReaders(replica, readers)
        self._serve(
            store, leaders_writer, leaders_readers, purger, purge_follower=replica.purge_follower
        )
        self._context.server.add_service(
            replica_pb2_grpc.add_PoolReplicaServiceServicer_to_server,
            PoolReplicaServicer(replica, store, purger),
            full_name=REPLICA_FULL_NAME,
        )
        self._replica = replica
        await replica.start()

    def _purger(self, store: PoolStore, readers: ReaderThreads) -> Purger:
        compactor = Compactor(store.environment, reserve_bytes=store.disk_reserve_bytes)
        self._opened.push_async_callback(compactor.stop)
        purger = Purger(store, readers, compactor)
        self._context.keep_running(purger.run(), name="purge")
        return purger

    def _serve(
        self,
        store: PoolStore,
        writer: WriterRef,
        readers: ReaderRef,
        purger: Purger,
        *,
        purge_follower: FileOf | None = None,
    ) -> None:
        config: PoolConfig = self._context.config
        ledger = ErasureLedger(self._context.coordinator)
        erasure = Erasure(store, writer, readers, purger, ledger, purge_follower=purge_follower)
        missed = self._missed_erasures(store, writer, readers)
        self._context.keep_running(missed.follow(), name="erasure-ledger")
        self._servicer = PoolServicer(
            store,
            writer,
            readers,
            purger.compactor,
            erasure,
            GroupMover(
                store, writer, readers, self._context.remote("pool", pool_pb2_grpc.PoolServiceStub)
            ),
            self._retention(store, writer, readers),
            WriteLimits(
                max_turn_bytes=config.max_turn_bytes, max_agent_rewards=config.max_agent_rewards
            ),
        )
        self._context.server.add_service(
            pool_pb2_grpc.add_PoolServiceServicer_to_server,
            self._servicer,
            full_name=FULL_NAME,
            scopes=SCOPES,
            audited=AUDITED,
        )

    def _missed_erasures(
        self, store: PoolStore, writer: WriterRef, readers: ReaderRef
    ) -> MissedErasures:
        return MissedErasures(store, writer, readers, ErasureLedger(self._context.coordinator))

    async def drain(self) -> None:
        """Ends open streams and lets the follower confirm commits in progress."""
        if self._servicer is not None:
            self._servicer.drain()
        if self._replica is not None:
            await self._replica.drain()

    def _retain(self, store: PoolStore, writer: WriterRef, readers: ReaderThreads) -> None:
        self._context.keep_running(self._watch_restored(store), name="restored")
        room = watch_room(store, readers, self._context.metadata, self._context.announce)
        self._context.keep_running(room, name="room")
        if self._context.config.retention.mode != "keep":
            retention = self._retention(store, writer, readers)
            self._context.keep_running(retention.run(), name="retention")

    async def _watch_restored(self, store: PoolStore) -> None:
        trainers = self._context.remote("trainer", trainer_pb2_grpc.TrainerServiceStub)
        await watch_restored(store.directory, store.shard, partial(trained_step, trainers))
        await asyncio.Event().wait()

    def _retention(self, store: PoolStore, writer: WriterRef, readers: ReaderRef) -> Retention:
        settings: RetentionSettings = self._context.config.retention
        trainers = self._context.remote("trainer", trainer_pb2_grpc.TrainerServiceStub)
        return Retention(
            store,
            writer,
            readers,
            policy=RetentionPolicy(keep_age_s=settings.keep_age_s, keep_bytes=settings.keep_bytes),
            coverage=partial(covered_step, trainers),
        )

    async def stop(self) -> None:
        """Closes the store, then gives up the shard's name."""
        if self._replica is not None:
            await self._replica.stop()
        await self._opened.aclose()
        # Once the store is closed another one may be served under the name.
        if self._held is not None:
            await self._held.close()


def _open_store(config: PoolConfig, on_panic: OnPanic) -> PoolStore:
    return PoolStore(
        Path(config.data_dir),
        shard=config.shard,
        map_bytes=config.store.map_bytes,
        map_max_bytes=config.store.map_max_bytes,
        disk_reserve_bytes=config.store.disk_reserve_bytes,
        # One each, and one for the writer's thread.
        max_readers=config.store.reader_threads + 1,
        on_panic=on_panic,
    )
