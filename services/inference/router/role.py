"""Wiring of a router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.tasks import first_done
from forge.runtime.coordination import Discovery
from forge.runtime.process.service import ServiceContext
from forge.runtime.rpc.clock import read_clock
from forge.runtime.serving_groups import kind_in
from forge.v1 import inference_pb2_grpc as rpc
from services.inference.config import InferenceConfig
from services.inference.engines.model_limits import read_limits
from services.inference.router.actor import RouterActor
from services.inference.router.cache_watch import CacheWatch
from services.inference.router.messages import CacheReported, FleetChanged
from services.inference.router.open_calls import PING_S
from services.inference.router.service import InferenceServicer

SCOPES = {"GetInferenceStatus": "viewer"}


async def start_role(context: ServiceContext) -> Callable[[], Awaitable[None]]:
    """Spawn the actor, add the servicer and watch discovery; return the drain."""
    config: InferenceConfig = context.config
    limits = read_limits(config.model_path, context_tokens=config.context_tokens)

    async def ping(address: str) -> None:
        # The clock: every server has one, without a token.
        await read_clock(context.channels.get(address), name=address, timeout_s=PING_S)

    discoveries = [
        context.coordinator.discover(kind_in(config.serving_group, role))
        for role in ("prefill", "decode")
    ]
    caches = CacheWatch(
        context.channels,
        lambda worker, change: router.tell(CacheReported(worker=worker, change=change)),
    )
    router: ActorRef = await context.actors.spawn(
        lambda: RouterActor(
            discoveries,
            queue_limit=config.router.queue_limit,
            version_wait_s=config.router.version_wait_s,
            patience_s=config.router.worker_wait_s,
            local_prefill_tokens=config.router.local_prefill_tokens,
            ping=ping,
            on_workers=caches.follow,
        ),
        name="router",
    )
    servicer = InferenceServicer(router, context.channels, limits, config)
    context.server.add_service(
        rpc.add_InferenceServiceServicer_to_server,
        servicer,
        full_name="forge.v1.InferenceService",
        scopes=SCOPES,
    )
    context.keep_running(watch(discoveries, router), name="fleet-watch")

    async def drain() -> None:
        await servicer.drain()
        await caches.close()

    return drain


async def watch(discoveries: Sequence[Discovery], router: ActorRef) -> None:
    """Send every change of discovery to the router actor."""
    while True:
        changes = [asyncio.ensure_future(discovery.changed()) for discovery in discoveries]
        router.tell(FleetChanged())
        await first_done(*changes)
