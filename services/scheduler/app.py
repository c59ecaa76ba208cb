"""Wiring of a scheduler instance: its servicer and its elections."""

from __future__ import annotations

import asyncio
import contextlib
import gc

from forge.client.scheduler import TERM_ERROR_KEY
from forge.core.errors import ForgeError, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait, first_done
from forge.runtime.coordination import Leadership
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import log
from forge.v1 import pool_pb2_grpc, scheduler_pb2_grpc
from services.scheduler import metrics
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.standby import ShardCopies
from services.scheduler.leadership.term import Term
from services.scheduler.service import AUDITED, FULL_NAME, SCOPES, SchedulerServicer
from services.scheduler.shards.pool_shards import PoolShards, ShardScans

ELECTION = "scheduler"
AWAITS = "awaits_shards"
"""Metadata key: pool shards that an elected instance waits for before its term begins."""
END_S = 30.0
"""Longest time of a term's end, with its last writes to the pool and etcd."""
_PAUSE_S = 1.0
"""After a term, so that another instance may be elected."""


class SchedulerApp:
    """One scheduler instance: leader or standby."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def start(self) -> None:
        """Serves as a standby and stands for election."""
        config = self._context.config
        assert isinstance(config, SchedulerConfig)
        self._config = config
        coordinator = self._context.coordinator
        self._pools = coordinator.discover("pool")
        self._pool = self._context.remote("pool", pool_pb2_grpc.PoolServiceStub)
        # Copies outlive a failed term: those that it did not take stay valid.
        self._copies = ShardCopies(
            ShardScans(self._pools, self._pool, timeout_s=config.pool_timeout_s),
            most_settled=config.held_settled_groups,
        )
        self._servicer = SchedulerServicer(
            config, self._context.security.keyring, coordinator.discover("scheduler"), coordinator
        )
        self._context.server.add_service(
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            self._servicer,
            full_name=FULL_NAME,
            scopes=SCOPES,
            audited=AUDITED,
        )
        self._context.metadata["leader"] = "false"
        metrics.show_leading(False)
        self._candidate = asyncio.create_task(self._stand(), name="election")

    async def drain(self) -> None:
        """Ends the term, if it leads, and leaves the election."""
        await cancel_and_wait(self._candidate, repeat_s=END_S)

    async def stop(self) -> None:
        """The same as `drain`."""
        await self.drain()

    async def _stand(self) -> None:
        """Stand for election, again after each term."""
        while True:
            await self._stand_once()
            # The ended term may leave a million groups in reference cycles. Collect them before
            # the standby freezes its copies, because garbage would be frozen with them.
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
            # Otherwise this instance would look healthy but never stand for election again.
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
            await cancel_and_wait(following)

    async def _serve(self, term: Term) -> None:
        begin = asyncio.create_task(term.begin())
        ended = asyncio.create_task(term.ended())
        try:
            self._servicer.awaiting_term = term
            await first_done(begin, asyncio.shield(ended))
            self._servicer.awaiting_term = None
            if begin.done():
                self._servicer.leader = begin.result()
                await self._announce_leading(True)
                await ended
        finally:
            self._servicer.leader = self._servicer.awaiting_term = None
            await cancel_and_wait(begin, ended)
            await self._announce_leading(False)

    async def _announce_failure(self, reason: str) -> None:
        """Publish why the last term ended, in answers and in discovery."""
        self._servicer.last_failure = reason
        await self._publish(TERM_ERROR_KEY, reason)

    async def _await_shards(self, missing: frozenset[str]) -> None:
        """Publish in discovery which pool shards the term waits for."""
        await self._publish(AWAITS, ",".join(sorted(missing)))

    async def _announce_leading(self, leading: bool) -> None:
        metrics.show_leading(leading)
        if leading:
            self._servicer.last_failure = ""
            self._context.metadata.pop(TERM_ERROR_KEY, None)
        await self._publish("leader", "true" if leading else "false")

    async def _publish(self, key: str, value: str) -> None:
        if self._context.metadata.get(key, "") != value:
            self._context.metadata[key] = value
            # Without etcd nothing is published; the whole entry is written when etcd is back.
            with contextlib.suppress(Unavailable):
                await self._context.announce()
