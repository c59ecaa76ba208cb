"""Wiring of a scheduler instance: the servicer, and the election it stands in all its life."""

from __future__ import annotations

import asyncio
import contextlib
import gc

from forge.core.errors import ForgeError, Unavailable
from forge.runtime.coordination import Leadership
from forge.runtime.first_done import first_done
from forge.runtime.service import ServiceContext
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2_grpc, scheduler_pb2_grpc
from services.scheduler import metrics
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.standby import ShardCopies
from services.scheduler.leadership.term import Term
from services.scheduler.pool_shards import PoolShards, ShardScans
from services.scheduler.service import FULL_NAME, SCOPES, SchedulerServicer

ELECTION = "scheduler"
TERM_ERROR_KEY = "term_error"
"""Metadata of an instance whose last term failed: the reason."""
AWAITS = "awaits_shards"
"""Metadata of an elected instance whose term has not begun: the pool shards it waits for."""
_PAUSE_S = 1.0
"""After a term that could not begin, so that another instance may try."""


class SchedulerApp:
    """One scheduler instance: leader or standby."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._office_holder: asyncio.Task[None] | None = None

    async def start(self) -> None:
        config = self._context.config
        assert isinstance(config, SchedulerConfig)
        self._config = config
        coordinator = self._context.coordinator
        self._pools = coordinator.discover("pool")
        self._pool = self._context.remote("pool", pool_pb2_grpc.PoolServiceStub)
        # They outlive a term that could not begin: what was not taken for it is as good as before.
        self._copies = ShardCopies(
            ShardScans(self._pools, self._pool, timeout_s=config.pool_timeout_s),
            most_settled=config.held_settled_groups,
        )
        self._servicer = SchedulerServicer(
            config, self._context.security.keyring, coordinator.discover("scheduler")
        )
        self._context.server.add(
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            self._servicer,
            full_name=FULL_NAME,
            scopes=SCOPES,
        )
        self._context.metadata["leader"] = "false"
        metrics.show_leading(False)
        self._candidate = asyncio.create_task(self._stand(), name="election")

    async def drain(self) -> None:
        self._candidate.cancel()
        await asyncio.wait({self._candidate})

    async def stop(self) -> None:
        await self.drain()

    async def _stand(self) -> None:
        """Stand in one election after the other."""
        while True:
            await self._stand_once()
            # The term that is over may be a million groups, in cycles. They go before the copies
            # of a standby come, which are frozen, and what is garbage by then would be with them.
            gc.collect()
            await asyncio.sleep(_PAUSE_S)

    async def _stand_once(self) -> None:
        leadership = await self._until_elected()
        timeout_s = self._config.pool_timeout_s
        shards = PoolShards(self._pools, self._pool, leadership, timeout_s=timeout_s)
        term = Term(
            self._config,
            self._context.coordinator,
            leadership,
            shards,
            self._copies,
            awaiting=self._await_shards,
        )
        try:
            await self._serve(term)
        except ForgeError as error:
            log.warning("term_failed", error=str(error))
            await self._announce_failure(str(error))
        except Exception as error:
            # An instance that no longer stands for election would look alive for ever.
            log.exception("term_crashed")
            await self._announce_failure(repr(error))
        finally:
            await term.end()

    async def _until_elected(self) -> Leadership:
        following = asyncio.create_task(self._copies.follow(), name="standby")
        try:
            return await self._context.coordinator.campaign(
                ELECTION, self._config.instance_id, ttl_s=self._config.lease_ttl_s
            )
        finally:
            following.cancel()
            await asyncio.wait({following})

    async def _serve(self, term: Term) -> None:
        begin = asyncio.create_task(term.begin())
        ended = asyncio.create_task(term.ended())
        try:
            await first_done(begin, asyncio.shield(ended))
            if begin.done():
                self._servicer.office = begin.result()
                await self._announce(leading=True)
                await ended
        finally:
            self._servicer.office = None
            for task in (begin, ended):
                task.cancel()
            await asyncio.wait({begin, ended})
            await self._announce(leading=False)

    async def _announce_failure(self, reason: str) -> None:
        """Show why the last term ended, to callers and to everybody in discovery."""
        self._servicer.last_failure = reason
        if self._context.metadata.get(TERM_ERROR_KEY) != reason:
            self._context.metadata[TERM_ERROR_KEY] = reason
            with contextlib.suppress(Unavailable):
                await self._context.announce()

    async def _await_shards(self, missing: frozenset[str]) -> None:
        """Tell whoever looks for a leader which pool shards it waits for."""
        awaited = ",".join(sorted(missing))
        if self._context.metadata.get(AWAITS, "") == awaited:
            return
        self._context.metadata[AWAITS] = awaited
        with contextlib.suppress(Unavailable):
            await self._context.announce()

    async def _announce(self, *, leading: bool) -> None:
        metrics.show_leading(leading)
        self._context.metadata["leader"] = "true" if leading else "false"
        if leading:
            self._servicer.last_failure = ""
            self._context.metadata.pop(TERM_ERROR_KEY, None)
        # Without etcd nobody can be told; the entry is written whole when it is back.
        with contextlib.suppress(Unavailable):
            await self._context.announce()
