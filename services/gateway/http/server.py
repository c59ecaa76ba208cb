"""The HTTP server: routes, credentials, errors, limits.

Owns everything around a request but its meaning. The session token is the API key, or a part of
the path (`/s/<token>/v1/...`) for programs that take a base URL only.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from forge.core.errors import ConfigError, ForgeError, PermissionDenied, Unauthenticated
from forge.runtime.security import Claims, Security
from forge.runtime.telemetry import bind_context, log
from services.gateway.closing import close_session
from services.gateway.errors import UnknownModel
from services.gateway.http import schema
from services.gateway.http.completions import Completion
from services.gateway.http.errors import body, error_body, error_headers
from services.gateway.metrics import REQUESTS
from services.gateway.pool import Pool
from services.gateway.sessions import Sessions
from services.gateway.turns import TurnRequest, Turns

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    def __init__(
        self,
        turns: Turns,
        sessions: Sessions,
        pool: Pool,
        security: Security,
        *,
        model_names: frozenset[str],
        max_body_bytes: int,
    ) -> None:
        self._turns = turns
        self._sessions = sessions
        self._pool = pool
        self._security = security
        self._model_names = model_names
        self._started_unix_s = int(time.time())
        self._runner = web.AppRunner(
            self._application(max_body_bytes), access_log=None, handler_cancellation=True
        )

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listens and returns the port. Raises `ConfigError` when it is taken."""
        if tls is None:
            self._security.require_plain_allowed(host)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=tls, shutdown_timeout=1.0)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"http_port = {port}: {host}:{port} cannot be bound: {error.strerror}; "
                "choose another with --http-port, or 0 for any free one"
            ) from None
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        await self._runner.cleanup()

    def _application(self, max_body_bytes: int) -> web.Application:
        app = web.Application(client_max_size=max_body_bytes, middlewares=[_answer_errors])
        app.router.add_get("/healthz", self._healthz)
        for prefix in ("", "/s/{token}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat_completions)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)
            app.router.add_post(f"{prefix}/v1/forge/close", self._close)
        return app

    async def _healthz(self, request: web.Request) -> web.Response:
        return _json({"status": "ok", "model": self._turns.model.name})

    async def _models(self, request: web.Request) -> web.Response:
        self._claims(request)
        return _json({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._claims(request)
        self._check_model(request.match_info["model"])
        return _json(self._model_object())

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        arrived_s, arrived_unix_s = time.monotonic(), time.time()
        claims = self._claims(request)
        asked = schema.decode(await request.read(), schema.ChatCompletionRequest)
        self._check_model(asked.model)
        turn = TurnRequest(
            messages=schema.messages_of(asked),
            tools=schema.tools_of(asked.tools),
            call_tools=asked.tool_choice != "none",
            required_tool=schema.required_tool(asked, self._turns.model.format),
            sampling=schema.sampling_of(asked),
            stop=schema.stop_of(asked),
            stream=bool(asked.stream),
            arrived_s=arrived_s,
            arrived_unix_s=arrived_unix_s,
        )
        choices = schema.choices_of(asked)
        async with self._sessions.use(claims) as session:
            completion = Completion(
                turns=self._turns,
                session=session,
                request=turn,
                choices=choices,
                logprobs=bool(asked.logprobs),
                include_usage=bool(asked.stream_options and asked.stream_options.include_usage),
            )
            if turn.stream:
                return await completion.stream(request)
            return _json(await completion.whole())

    async def _close(self, request: web.Request) -> web.Response:
        claims = self._claims(request)
        asked = schema.decode(await request.read(), schema.CloseRequest)
        async with self._sessions.use(claims) as session:
            summary = await close_session(
                self._sessions,
                self._pool,
                session,
                rewards=schema.rewards_of(asked),
                abandon_reason=asked.abandon_reason,
                min_turns=asked.min_turns,
            )
        return _json({"turns": summary.turns, "sampled_tokens": summary.sampled_tokens})

    def _claims(self, request: web.Request) -> Claims:
        """Whose session this is. Raises `Unauthenticated` or `PermissionDenied`."""
        token = request.match_info.get("token") or _bearer(request.headers)
        claims = self._security.keyring.verify(token, now_s=time.time())
        if not claims.allows("session"):
            raise PermissionDenied(
                f"the token of {claims.subject} is not a session's, and only sessions sample"
            )
        bind_context(trajectory_id=claims.trajectory_id)
        return claims

    def _check_model(self, name: str) -> None:
        if name not in self._model_names and "*" not in self._model_names:
            raise UnknownModel(
                f"model {name[:100]!r} is not served here; {self._turns.model.name!r} is"
            )

    def _model_object(self) -> dict[str, Any]:
        model = self._turns.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "forge",
            "context_tokens": model.context_tokens,
        }


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure as an OpenAI error object; counted and logged like everything else."""
    started_s = time.perf_counter()
    try:
        response = await handler(request)
    except ForgeError as error:
        response = _json(error_body(error), status=error.http_status, headers=error_headers(error))
    except web.HTTPException as error:
        response = _json(body(error.status, _explain(request, error), "http"), status=error.status)
    except ExceptionGroup as group:
        response = _group(group)
    except Exception:
        log.exception("http_request_failed", path=_route(request))
        message = "internal error; the gateway's log has the cause"
        response = _json(body(500, message, "internal"), status=500)
    REQUESTS.labels("http", str(response.status)).inc()
    elapsed_s = time.perf_counter() - started_s
    log.debug("http", path=_route(request), status=response.status, s=elapsed_s)
    return response


def _route(request: web.Request) -> str:
    """The path as it was routed: without the token it may hold."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


def _group(group: ExceptionGroup) -> web.Response:
    """Of several choices that failed together, the first error speaks."""
    first = group.exceptions[0]
    if not isinstance(first, ForgeError):
        raise first
    return _json(error_body(first), status=first.http_status, headers=error_headers(first))


def _explain(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 413:
        return f"the request body is too large: {error.text}"
    return f"{request.method} {request.path.split('/v1', 1)[-1][:100]}: {error.reason}"


def _bearer(headers: Mapping[str, str]) -> str:
    kind, _, token = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    key = headers.get("x-api-key", "")
    if not key:
        raise Unauthenticated("no session token: give it as the API key")
    return key


def _json(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        headers=headers,
        content_type="application/json",
    )
