"""Wiring of a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

from forge.core.errors import DataLoss
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.tasks import first_done
from forge.runtime.coordination import Discovery, Versioned
from forge.runtime.process.service import ServiceContext
from forge.runtime.rpc.clock import read_clock
from forge.runtime.serving_groups import kind_in
from forge.runtime.weights import NO_HOLD, WeightHold, hold_key
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.config import InferenceConfig, RouterSettings
from services.inference.engines.model_limits import read_limits
from services.inference.router.actor import RouterActor
from services.inference.router.cache_watch import CacheWatch
from services.inference.router.fleet.canary import Canary
from services.inference.router.fleet.fleet import Fleet
from services.inference.router.fleet.open_calls import PING_S
from services.inference.router.fleet.versions import Versions
from services.inference.router.messages import CacheReported, FleetChanged, HoldChanged
from services.inference.router.service import InferenceServicer
from services.inference.router.worker_streams import WorkerStreams

SCOPES = {"GetInferenceStatus": "viewer"}


async def start_role(context: ServiceContext) -> Callable[[], Awaitable[None]]:
    """Spawn the actor, add the servicer and watch discovery; return the drain."""
    config: InferenceConfig = context.config
    limits = read_limits(config.model_path, context_tokens=config.context_tokens)

    discoveries = [
        context.coordinator.discover(kind_in(config.serving_group, role))
        for role in ("prefill", "decode")
    ]
    router, caches = await _start_router(context, discoveries)
    streams = WorkerStreams(context.channels)
    # After the server has stopped: its last answers need them.
    context.undo.push_async_callback(streams.close)
    servicer = InferenceServicer(router, streams, limits, config)
    context.server.add_service(
        rpc.add_InferenceServiceServicer_to_server,
        servicer,
        full_name="forge.v1.InferenceService",
        scopes=SCOPES,
    )
    context.keep_running(watch(discoveries, router), name="fleet-watch")
    holds = context.coordinator.follow(hold_key(config.policy))
    context.keep_running(watch_holds(holds, router), name="hold-watch")

    async def drain() -> None:
        await servicer.drain()
        await caches.close()

    return drain


async def _start_router(
    context: ServiceContext, discoveries: Sequence[Discovery]
) -> tuple[ActorRef, CacheWatch]:
    """Spawn the router actor, which hears of caches from the returned watch."""
    config: InferenceConfig = context.config

    async def ping(address: str) -> None:
        # The clock: every server has one, without a token.
        await read_clock(context.channels.get(address), name=address, timeout_s=PING_S)

    caches = CacheWatch(
        context.channels,
        lambda worker, change: router.tell(CacheReported(worker=worker, change=change)),
    )
    router: ActorRef = await context.actors.spawn(
        lambda: RouterActor(
            discoveries,
            queue_limit=config.router.queue_limit,
            fleet=_fleet(config.router),
            ping=ping,
            on_workers=caches.follow,
        ),
        name="router",
    )
    return router, caches


async def watch_holds(holds: AsyncGenerator[Versioned | None, None], router: ActorRef) -> None:
    """Send every change of the hold to the router actor."""
    async with aclosing(holds) as changes:
        async for value in changes:
            with suppress(DataLoss):
                # The workers' logs report an unreadable hold.
                hold = NO_HOLD if value is None else WeightHold.decode(value.value)
                router.tell(HoldChanged(newest=max(hold.versions, default=None)))


def _fleet(rules: RouterSettings) -> Fleet:
    return Fleet(
        versions=Versions(wait_s=rules.version_wait_s),
        local_prefill_tokens=rules.local_prefill_tokens,
        patience_s=rules.worker_wait_s,
        canary=Canary(engine=rules.canary_engine, share=rules.canary_share),
    )


async def watch(discoveries: Sequence[Discovery], router: ActorRef) -> None:
    """Send every change of discovery to the router actor."""
    while True:
        changes = [asyncio.ensure_future(discovery.changed()) for discovery in discoveries]
        router.tell(FleetChanged())
        await first_done(*changes)
