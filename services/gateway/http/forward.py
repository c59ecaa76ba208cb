"""Passes requests for external APIs through over HTTP, complete or streamed.

`relay` owns the order of a call and its record, `services.gateway.external` the calls; the bodies
are the agent's and the API's own. A stream that ends before its last event ends with an error event
of its protocol.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from aiohttp import web

from forge.core.errors import ForgeError
from forge.runtime.security.tokens import Claims
from services.gateway.conversation.agent_time import Moment
from services.gateway.errors import ApiRejected
from services.gateway.external.api import ExternalApi
from services.gateway.http.edge import SSE_HEADERS, Edge
from services.gateway.http.errors import failure_headers, public_error
from services.gateway.http.relay import Relay, is_stream
from services.gateway.http.request_fields.request_body import UNREADABLE

ErrorEvent = Callable[[ForgeError], bytes]


def _no_event(error: ForgeError) -> bytes:
    return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request that names a model, with the claims of its token."""

    http: web.Request
    claims: Claims
    body: bytes
    arrived: Moment


class _Named(msgspec.Struct):
    model: str


def external_of(
    edge: Edge, claims: Claims, body: bytes, *, name: str | None = None
) -> ExternalApi | None:
    """Returns the external API that a request names, by `name` or in its body; None for a model
    that is served here, and for a body that the protocol refuses. Raises `UnknownModel`,
    `ModelNotAllowed`."""
    if name is None:
        if not edge.models.has_external:
            return None
        try:
            name = msgspec.json.decode(body, type=_Named).model
        except UNREADABLE:
            return None
    found = edge.models.find(claims, name)
    return found if isinstance(found, ExternalApi) else None


def served_or_forwarded(
    edge: Edge,
    path: str,
    serve: Callable[[ModelRequest], Awaitable[web.StreamResponse]],
    *,
    error_events: Callable[[web.Request], ErrorEvent] = lambda _: _no_event,
    recorded: bool = True,
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Returns the handler of a path: it passes requests for external APIs through, and gives the
    others to `serve`. `recorded`: the answer is a turn."""

    async def handle(request: web.Request) -> web.StreamResponse:
        arrived, claims = Moment.now(), edge.claims(request)
        body = await edge.read_body(request)
        call = ModelRequest(http=request, claims=claims, body=body, arrived=arrived)
        # In Gemini's API the path names the model.
        api = external_of(edge, claims, body, name=request.match_info.get("model"))
        if api is None:
            return await serve(call)
        error_event = error_events(request)
        return await forward(edge, call, api, path, error_event=error_event, recorded=recorded)

    return handle


async def forward(
    edge: Edge,
    call: ModelRequest,
    api: ExternalApi,
    path: str,
    *,
    error_event: ErrorEvent = _no_event,
    recorded: bool = True,
) -> web.StreamResponse:
    """Passes one request through. `recorded`: its answer is a turn. Raises the errors of
    `ExternalApi.post`, `InvalidArgument` for a path that the API does not have."""
    api.target(path)
    async with edge.sessions.use_session(call.claims) as session:
        with edge.sessions.count_call(session), api.admit():
            relay = Relay(session, api, call.body, path=path, arrived=call.arrived)
            if recorded:
                await relay.begin()
            try:
                return await _answer(call.http, relay, error_event)
            except ApiRejected as error:
                return _rejection(error)
            finally:
                relay.leave()


async def _answer(
    request: web.Request, relay: Relay, error_event: ErrorEvent
) -> web.StreamResponse:
    response: web.StreamResponse | None = None
    events = request.query.get("alt") == "sse"
    try:
        async with relay.call(request.headers, events=events) as upstream:
            if not is_stream(upstream):
                content = await relay.complete(upstream)
                return web.Response(
                    body=content,
                    status=upstream.status,
                    headers=relay.headers,
                    content_type=upstream.content_type,
                )
            response = web.StreamResponse(headers=SSE_HEADERS | relay.headers)
            async for piece in relay.stream(upstream):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(piece)
            await response.write_eof()
    except Exception as error:
        # The response has not begun, or the agent is gone.
        if response is None or not response.prepared or isinstance(error, ConnectionError):
            raise
        await response.write(error_event(public_error(error)))
    return response


def _rejection(error: ApiRejected) -> web.Response:
    """Returns the API's own answer to a wrong request."""
    if not error.body:
        raise error
    return web.Response(
        text=error.body,
        status=error.status,
        content_type="application/json",
        headers=failure_headers(error),
    )
