"""The gRPC server of every service.

Owns listening, health, reflection, limits of connections and calls, and graceful stop. Not here:
credentials, error translation, metrics, access and audit log (`forge.runtime.rpc.interceptor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from forge.core.errors import ConfigError
from forge.runtime.rpc.bind_errors import bind_error, bind_reason, bind_remedy
from forge.runtime.rpc.channel import MAX_MESSAGE_BYTES, MAX_REFUSED_BYTES
from forge.runtime.rpc.clock import ClockServicer
from forge.runtime.rpc.interceptor import CallInterceptor, current_claims
from forge.runtime.security.credentials import Security
from forge.v1 import clock_pb2, clock_pb2_grpc

__all__ = ["ConnectionLimits", "RpcServer", "current_claims"]

MAX_CONCURRENT_CALLS = 32_768
"""Further calls get RESOURCE_EXHAUSTED before they take memory."""

_CLOCK_NAME = clock_pb2.DESCRIPTOR.services_by_name["ClockService"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits on the connections of a server. A client above one is refused by gRPC itself."""

    connections: int = 16_384
    """Open connections; further ones are closed at once."""
    streams: int = 8192
    """Calls in flight on one connection; further ones wait at their client."""
    handshake_ms: int = 20_000
    """Longest time from a connection to its HTTP/2 settings, TLS included."""
    ping_interval_ms: int = 2000
    """Least time between two pings without data. `CHANNEL_OPTIONS` ping every 20 s, clients in
    other languages may every 5 s."""
    ping_strikes: int = 5
    """Pings before their time, after which a connection is closed. Data that is sent forgives them;
    without, a late ping makes the next one early."""


def _options(limits: ConnectionLimits) -> tuple[tuple[str, Any], ...]:
    return (
        ("grpc.max_receive_message_length", MAX_REFUSED_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A second process must not share the port.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", limits.ping_interval_ms),
        ("grpc.http2.max_ping_strikes", limits.ping_strikes),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.server_handshake_timeout_ms", limits.handshake_ms),
    )


class RpcServer:
    """Collects servicers, then listens."""

    def __init__(
        self,
        *,
        service: str,
        host: str,
        port: int,
        security: Security,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._service = service
        self._host = host
        self._port = port
        self._security = security
        self._limits = limits or ConnectionLimits()
        self._interceptor = CallInterceptor(security)
        self._registrations: list[Callable[[grpc.aio.Server], None]] = []
        self._names: list[str] = []
        self._health = health.aio.HealthServicer()
        self._health_updates: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self._credentials: grpc.ServerCredentials | None = None

    def add_service(
        self,
        register: Callable[[Any, Any], None],
        servicer: object,
        *,
        full_name: str,
        scopes: str | Mapping[str, str] = "service",
        audited: Collection[str] = (),
    ) -> None:
        """Add a servicer, e.g. `add(add_PoolServiceServicer_to_server, ..., full_name=...)`.

        `scopes` is the scope that callers need, for all methods or by method name; the default is
        "service", "" means none, "a|b" means either. `audited`: methods in the audit log.
        """
        assert self._server is None, "servicers are added before start"
        self._names.append(full_name)
        self._interceptor.require(full_name, scopes, audited)
        self._registrations.append(lambda server: register(servicer, server))

    async def start(self) -> str:
        """Listen; returns "host:port" with the port bound. Raises ConfigError if that fails."""
        credentials = self._security.server_credentials(self._host)
        # Probed first: gRPC reports a taken port in three lines of C++ log.
        if self._port and (error := bind_error(self._host, self._port)) is not None:
            raise self._not_bound(bind_reason(error).lower(), bind_remedy(error, option="--port"))
        server = grpc.aio.server(
            interceptors=[self._interceptor],
            options=_options(self._limits),
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        )
        for register in self._registrations:
            register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        # Open like health: a wrong clock may make tokens invalid.
        clock_pb2_grpc.add_ClockServiceServicer_to_server(ClockServicer(), server)
        reflection.enable_server_reflection(
            [*self._names, _CLOCK_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        await self._set_health(serving=False)
        address = f"{self._host}:{self._port}"
        try:
            port = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError:
            remedy = "choose another with --port, or 0 for any free one"
            raise self._not_bound("it cannot be bound", remedy) from None
        await server.start()
        # The credentials too: gRPC calls them at each handshake.
        self._server, self._credentials = server, credentials
        return f"{self._host}:{port}"

    def set_serving(self, serving: bool) -> None:
        """Set the health of the process and of each of its services."""
        task = asyncio.get_running_loop().create_task(self._set_health(serving=serving))
        self._health_updates.add(task)
        task.add_done_callback(self._health_updates.discard)

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new calls; cancel the calls in flight after `grace_s`."""
        await self._set_health(serving=False)
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    def _not_bound(self, reason: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"{self._service} cannot listen on {self._host}:{self._port}: {reason}; {remedy}"
        )
