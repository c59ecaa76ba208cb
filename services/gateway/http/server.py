"""HTTP server: routes, error responses, limits.

Owns the server and the conversion of errors; the protocol modules own the requests. The session
token is the API key, or a part of the path (`/s/<token>/v1/...`) for programs that have only a base
URL.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection

from aiohttp import web

from forge.core.errors import ConfigError
from forge.runtime.rpc.bind_errors import bind_fault
from forge.runtime.security.audit import write_audit
from forge.runtime.telemetry import log
from services.gateway.config import ConnectionSettings
from services.gateway.errors import BrokenBody
from services.gateway.http.anthropic.messages import AnthropicMessages
from services.gateway.http.bodies import release_body
from services.gateway.http.control import Control
from services.gateway.http.edge import CLAIMS, Edge, Endpoints, json_response, route_of
from services.gateway.http.embeddings import Embeddings
from services.gateway.http.errors import (
    REQUEST_ID,
    Failure,
    anthropic_error,
    google_error,
    openai_error,
    public_error,
    speaks_anthropic,
    speaks_google,
)
from services.gateway.http.gemini.generate import Gemini
from services.gateway.http.listener.connections import Connection, Connections
from services.gateway.http.listener.shared_port import SharedPort
from services.gateway.http.models import Models
from services.gateway.http.openai.completions.chat import ChatCompletions
from services.gateway.http.openai.completions.completions import Completions
from services.gateway.http.openai.responses.responses import Responses
from services.gateway.http.openapi import OpenApi
from services.gateway.http.request_span import end_request_span
from services.gateway.http.tokens import Tokens
from services.gateway.metrics import REQUESTS

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PREFIXES = ("", "/s/{token}")
LISTEN_BACKLOG = 128
_PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}
"""The field of OpenAI's requests that has the prompt."""


class HttpServer:
    """Serves all protocols on one port."""

    def __init__(self, edge: Edge, *, max_body_bytes: int, connections: ConnectionSettings) -> None:
        self._edge = edge
        self._connections = Connections(connections)
        self._runner = web.AppRunner(
            self._application(max_body_bytes), handler_cancellation=True, shutdown_timeout=1.0
        )
        self._listener: asyncio.Server | None = None
        self._shared: SharedPort | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises `ConfigError` if the port is in use."""
        tls = self._edge.security.http_context(host)
        await self._runner.setup()
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None, "set up before"
        try:
            self._listener = await loop.create_server(
                lambda: Connection(server, self._connections, loop),
                host,
                port,
                ssl=tls,
                ssl_handshake_timeout=self._connections.settings.header_timeout_s if tls else None,
                backlog=LISTEN_BACKLOG,
            )
        except OSError as error:
            raise ConfigError(
                f"http.port = {port}: {host}:{port} cannot be bound: "
                f"{bind_fault(error, '--http.port')}"
            ) from None
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    async def start_shared(
        self, host: str, port: int, instance_id: str, *, peers: Callable[[], Collection[str]]
    ) -> None:
        """Listens on a port that all gateways of this host share, after `start`; `peers`: the
        instances that do now. Raises `ConfigError` if it is in use, or with TLS."""
        if self._edge.security.http_context(host) is not None:
            raise ConfigError(
                f"http.shared_port = {port} is not allowed with TLS: terminate TLS at a proxy, or "
                "use each instance's port"
            )
        server, settings = self._runner.server, self._connections.settings
        assert server is not None, "set up before"
        loop = asyncio.get_running_loop()
        self._shared = SharedPort(
            instance_id,
            peers=peers,
            session_of=self._edge.session_of,
            header_timeout_s=settings.header_timeout_s,
            most=settings.max_connections,
        )
        await self._shared.start(host, port, lambda: Connection(server, self._connections, loop))

    async def leave_shared(self) -> None:
        """Closes the shared port, so that other gateways get its connections."""
        if self._shared is not None:
            await self._shared.stop()
            self._shared = None

    async def stop(self) -> None:
        """Ends all connections."""
        await self.leave_shared()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()

    def _application(self, max_body_bytes: int) -> web.Application:
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_answer_errors])
        app.on_response_prepare.append(_name_request)
        app.router.add_get("/healthz", self._healthz)
        protocols: tuple[Endpoints, ...] = (
            ChatCompletions(self._edge),
            Completions(self._edge),
            Responses(self._edge),
            AnthropicMessages(self._edge),
            Gemini(self._edge),
            Models(self._edge),
            Tokens(self._edge),
            Embeddings(self._edge),
            Control(self._edge),
            OpenApi(self._edge),
        )
        for prefix in PREFIXES:
            for protocol in protocols:
                protocol.add_routes(app.router, prefix)
        return app

    async def _healthz(self, request: web.Request) -> web.Response:
        return json_response({"status": "ok", "model": self._edge.turns.model.name})


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Converts failures to error responses of the protocol; counts and logs every request."""
    started_s, failure, response = time.perf_counter(), None, None
    if speaks_anthropic(request):
        request[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
    connection = request.protocol
    assert isinstance(connection, Connection), "made by HttpServer"
    try:
        with connection.request():
            response = await handler(request)
    except web.HTTPException as error:
        failure = Failure(
            status=error.status,
            message=_explain(request, error),
            code="http",
            headers={name: value for name, value in error.headers.items() if name == "Allow"},
        )
        response = _refusal(request, failure)
    except Exception as error:
        prompt = _PROMPTS.get(route_of(request).removeprefix(PREFIXES[1]))
        failure = Failure.of(public_error(error), prompt=prompt)
        response = _refusal(request, failure)
        if isinstance(error, BrokenBody):
            response.force_close()
    finally:
        release_body(request)
        # None: the agent left.
        end_request_span(response.status if response is not None else 0)
    _audit(request, failure)
    REQUESTS.labels("http", str(response.status)).inc()
    elapsed_s = time.perf_counter() - started_s
    log.debug("http", path=route_of(request), status=response.status, s=elapsed_s)
    return response


def _audit(request: web.Request, failure: Failure | None) -> None:
    """Writes calls of graders and refused calls to the audit log."""
    claims = request.get(CLAIMS)
    if claims and ("grader" in claims.scopes or (failure and failure.status == 403)):
        code, error = (failure.code.upper(), failure.message) if failure else ("OK", None)
        method = f"{request.method} {route_of(request)}"
        write_audit(method, claims, peer=request.remote or "", code=code, error=error)


def _refusal(request: web.Request, failure: Failure) -> web.Response:
    if speaks_google(request):
        return json_response(google_error(failure), status=failure.status, headers=failure.headers)
    if not speaks_anthropic(request):
        return json_response(openai_error(failure), status=failure.status, headers=failure.headers)
    refusal = anthropic_error(failure, request[REQUEST_ID])
    return json_response(refusal, status=failure.status, headers=failure.headers)


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["request-id"] = request[REQUEST_ID]


def _explain(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 413:
        return f"the request body is too large: {error.text}"
    # Without the session token of the path.
    path = re.sub(r"^/s/[^/]*", "", request.path)
    said = f"{request.method} {path[:100]}: {error.reason}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{said}; use {' or '.join(sorted(error.allowed_methods))}"
    served = {resource.canonical for resource in request.app.router.resources()}
    if f"/v1{path}" in served:
        return f"{said}; the base URL must end with /v1"
    if path.startswith("/v1/v1/") and path.removeprefix("/v1") in served:
        return f"{said}; the client adds /v1 to the base URL: leave it out"
    return said
