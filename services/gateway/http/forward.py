"""Passes requests for external APIs through over HTTP, complete or streamed.

`relay` owns the order of a call and its record, `services.gateway.external` the calls; the bodies
are the agent's and the API's own. A stream that ends before its last event ends with an error event
of its protocol.
"""

from __future__ import annotations

from collections.abc import Callable

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

ErrorEvent = Callable[[ForgeError], bytes]


class _Named(msgspec.Struct):
    model: str


def external_of(edge: Edge, claims: Claims, body: bytes) -> ExternalApi | None:
    """Returns the external API that a request names; None for a model that is served here, and for
    a body that the protocol refuses. Raises `UnknownModel`, `ModelNotAllowed`."""
    if not edge.models.has_external:
        return None
    try:
        name = msgspec.json.decode(body, type=_Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    found = edge.models.find(claims, name)
    return found if isinstance(found, ExternalApi) else None


async def forward(
    edge: Edge,
    request: web.Request,
    api: ExternalApi,
    body: bytes,
    *,
    claims: Claims,
    path: str,
    error_event: ErrorEvent = lambda error: b"",
    recorded: bool = True,
) -> web.StreamResponse:
    """Passes one request through. `recorded`: its answer is a turn. Raises the errors of
    `ExternalApi.post`, `InvalidArgument` for a path that the API does not have."""
    arrived = Moment.now()
    api.target(path)
    async with edge.sessions.use_session(claims) as session:
        with edge.sessions.count_call(session), api.admit():
            relay = Relay(session, api, body, path=path, arrived=arrived)
            if recorded:
                await relay.begin()
            try:
                return await _answer(request, relay, error_event)
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
