"""Wiring of a gateway instance: model, sessions, pool, router, HTTP and gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.coordination.shard_record import gone_text
from forge.runtime.process.allocator import keep_freed_memory, settle
from forge.runtime.process.service import ServiceContext
from forge.runtime.serving_groups import kind_in
from forge.runtime.telemetry import log
from forge.v1 import gateway_pb2_grpc, inference_pb2_grpc, pool_pb2_grpc
from services.gateway.actors.session import SessionSettings
from services.gateway.admission import CallAdmission
from services.gateway.config import GatewayConfig
from services.gateway.external.api import ExternalApi
from services.gateway.http.bodies import Bodies
from services.gateway.http.edge import Edge
from services.gateway.http.listener.shared_port import port_of_host
from services.gateway.http.message_parts.images import image_policy
from services.gateway.http.server import HttpServer
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.encode_threads import EncodeThreads
from services.gateway.model.other_model import OtherModel
from services.gateway.model_table import ModelEntry, ModelTable
from services.gateway.pool_client import Pool
from services.gateway.router.router_stream import RouterStreams
from services.gateway.service import AUDITED, FULL_NAME, SCOPES, GatewayServicer
from services.gateway.sessions import SessionLimits, Sessions
from services.gateway.tenants import Tenants
from services.gateway.turns.record import OtherRecord
from services.gateway.turns.run import Turns

SHARED_KEY = "shared_http"
"""Metadata in discovery: the port of a host that its gateways share."""
KEPT_BYTES = 32 << 20
"""Freed memory that the allocator keeps instead of returning it to the system."""
MAPPED_BYTES = 4 << 20
"""Blocks from this size on are mapped individually; a prompt of a million ids is smaller."""


class GatewayApp:
    """One gateway instance, from loaded tokenizer to drained backlog."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        # A session that crashes again and again must not take the process along: it is left
        # dead, and read back from the pool when it is called next.
        self._actors = ActorSystem("gateway-sessions")
        self._threads: EncodeThreads | None = None
        self._streams: list[RouterStreams] = []
        self._apis: list[ExternalApi] = []

    async def start(self) -> None:
        """Loads the model, then listens on HTTP and gRPC."""
        config = self._context.config
        assert isinstance(config, GatewayConfig)
        keep_freed_memory(KEPT_BYTES, mapped_bytes=MAPPED_BYTES)
        model = await _policy(config)
        pools = self._context.remote("pool", pool_pb2_grpc.PoolServiceStub)
        pool = Pool(
            pools,
            timeout_s=config.pool_timeout_s,
            wait_s=config.pool_wait_s,
            gone=partial(gone_text, self._context.coordinator),
        )
        self._tenants = Tenants(config.tenants, clock=time.monotonic)
        self._sessions = sessions = self._make_sessions(config, model, pool)
        turns = self._make_turns(config, model)
        names = (*config.model.aliases, model.name)
        entries = [await self._entry(config, name, turns) for name in config.models]
        models = ModelTable(turns, names, entries)
        self._context.server.add_service(
            gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
            GatewayServicer(turns, sessions, pool, self._tenants, models=models),
            full_name=FULL_NAME,
            scopes=SCOPES,
            audited=AUDITED,
        )
        await self._listen(config, turns, models, pool)
        settle()
        self._context.keep_running(self._sweep(config.sessions.idle_s), name="idle-sessions")

    async def drain(self) -> None:
        """Waits for calls in flight and for durable turns."""
        await self._http.leave_shared()
        await self._sessions.drain()

    async def stop(self) -> None:
        """Closes servers, streams and actors."""
        await self._http.stop()
        for streams in self._streams:
            await streams.close_streams()
        for api in self._apis:
            await api.close()
        await self._actors.stop()
        if self._threads is not None:
            self._threads.close()

    def _make_turns(
        self, config: GatewayConfig, model: ChatModel, *, group: str = "", **other: Any
    ) -> Turns:
        """`group`: the serving group of another model than the policy."""
        kind = kind_in(group, "router")
        routers = self._context.remote(kind, inference_pb2_grpc.InferenceServiceStub)
        self._streams.append(RouterStreams(routers))
        return Turns(
            model,
            self._sessions,
            self._streams[-1],
            sample_timeout_s=config.calls.sample_timeout_s,
            retry_for_s=config.calls.retry_for_s,
            bounds=config.sampling,
            record_experts=config.record_experts,
            **other,
        )

    async def _entry(self, config: GatewayConfig, name: str, policy: Turns) -> ModelEntry:
        settings = config.models[name]
        served: Turns | ExternalApi
        if settings.served_here:
            served = await self._other_turns(config, name, policy.model)
        else:
            served = ExternalApi(name, settings)
            self._apis.append(served)
        return ModelEntry(name=name, aliases=settings.aliases, open=settings.open, served=served)

    async def _other_turns(self, config: GatewayConfig, name: str, policy: ChatModel) -> Turns:
        settings = config.models[name]
        model = policy
        if settings.kind == "engine":
            model = await asyncio.to_thread(
                ChatModel.load,
                settings.model_path,
                name=name,
                context_tokens=settings.context_tokens,
                tool_format=settings.tool_format,
                reasoning_format=settings.reasoning_format,
            )
        other = OtherModel(
            name=name,
            kind=settings.kind,
            model=model,
            recorded_bytes=settings.recorded_kib << 10,
        )
        assert self._threads is not None, "made with the sessions"
        record = OtherRecord(other, self._threads)
        group = settings.group or name
        return self._make_turns(config, model, group=group, other=other, record=record)

    def _make_sessions(self, config: GatewayConfig, model: ChatModel, pool: Pool) -> Sessions:
        self._threads = threads = EncodeThreads(config.calls.encode_threads)

        def settings(writer: ActorRef, set_size: Callable[[str, int], None]) -> SessionSettings:
            return SessionSettings(
                model=model,
                fetch=pool.fetch,
                stored=pool.stored,
                writer=writer,
                set_size=set_size,
                clock=time.monotonic,
                threads=threads,
            )

        return Sessions(
            self._actors,
            limits=SessionLimits(
                sessions=config.sessions.max_sessions,
                session_bytes=int(config.sessions.max_session_mib * (1 << 20)),
                idle_s=config.sessions.idle_s,
                backlog_bytes=int(config.sessions.max_backlog_mib * (1 << 20)),
            ),
            admission=CallAdmission(
                calls=config.calls.max_calls,
                calls_per_session=config.calls.max_calls_per_session,
                tenants=self._tenants,
            ),
            settings=settings,
            open_stream=lambda shard: partial(pool.open_append_stream, shard),
            clock=time.monotonic,
        )

    async def _listen(
        self, config: GatewayConfig, turns: Turns, models: ModelTable, pool: Pool
    ) -> None:
        edge = Edge(
            turns=turns,
            sessions=self._sessions,
            pool=pool,
            security=self._context.security,
            models=models,
            body_timeout_s=config.connections.body_timeout_s,
            bodies=Bodies(
                most_bytes=int(config.http.max_bodies_mib * (1 << 20)),
                most_of_session_bytes=int(config.http.max_session_bodies_mib * (1 << 20)),
            ),
            tenants=self._tenants,
            images=image_policy(config.http.images, config.model_path),
            omits_web_search=config.http.web_search == "omit",
        )
        self._http = HttpServer(
            edge,
            max_body_bytes=int(config.http.max_body_mib * (1 << 20)),
            connections=config.connections,
        )
        port = await self._http.start(config.host, config.http.port)
        self._context.metadata["http"] = f"{config.advertise_host or config.host}:{port}"
        if config.http.shared_port:
            await self._share(config)

    async def _share(self, config: GatewayConfig) -> None:
        """Listens on the port of all gateways of this host."""
        shared = port_of_host(config.http.shared_port)
        self._context.metadata[SHARED_KEY] = shared
        discovery = self._context.coordinator.discover("gateway")

        def peers() -> list[str]:
            # An outage of etcd leaves the last known view.
            return [
                one.instance_id
                for one in discovery.instances
                if one.metadata.get(SHARED_KEY) == shared
            ]

        await self._http.start_shared(
            config.host, config.http.shared_port, config.instance_id, peers=peers
        )

    async def _sweep(self, idle_s: float) -> None:
        while True:
            await asyncio.sleep(max(1.0, idle_s / 10))
            await self._sessions.evict_idle()


async def _policy(config: GatewayConfig) -> ChatModel:
    """Load the tokenizer, the template and the formats of the policy."""
    model = await asyncio.to_thread(
        ChatModel.load,
        config.model_path,
        name=config.model.name,
        context_tokens=config.context_tokens,
        tool_format=config.model.tool_format,
        reasoning_format=config.model.reasoning_format,
    )
    log.info(
        "model_loaded",
        model=model.name,
        context_tokens=model.context_tokens,
        tool_format=model.format.name,
        reasoning_format=model.reasoning.name if model.reasoning else "none",
        looks_back_one_answer=model.template.looks_back_one_answer,
    )
    return model
