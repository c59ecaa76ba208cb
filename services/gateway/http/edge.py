"""The parts that all HTTP protocols share: credentials, model names, JSON and event responses.

Owns no protocol: each is a subclass of `Endpoints` that gets an `Edge`.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from forge.core.errors import ForgeError, PermissionDenied, Unauthenticated
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Claims
from forge.runtime.telemetry import bind_context
from services.gateway.conversation.call_labels import LABELS, split_key, with_headers
from services.gateway.conversation.turn_request import SIZE_BYTES
from services.gateway.errors import BrokenBody
from services.gateway.http.bodies import Bodies, check_encoding
from services.gateway.http.errors import public_error, speaks_google
from services.gateway.http.message_parts.images import ImagePolicy, refuse
from services.gateway.http.request_fields.request_body import without_lone_surrogates
from services.gateway.http.request_span import begin_request_span
from services.gateway.metrics import REFUSED
from services.gateway.model_table import ModelTable
from services.gateway.pool_client import Pool
from services.gateway.sessions import Sessions
from services.gateway.tenants import Tenants
from services.gateway.turns.run import Turns

CLAIMS = web.RequestKey("claims", Claims)
"""Key of a request's verified claims."""
SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


_KEY_HEADERS = frozenset({"authorization", "x-api-key", "x-goog-api-key"})


class Ending(bytes):
    """The last events of a stream, sent in one write with its end."""


class Endpoints(ABC):
    """The HTTP endpoints of one protocol."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    @abstractmethod
    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the routes below `prefix`: "" or "/s/{token}"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The gateway for the protocol classes."""

    turns: Turns
    """Turns of the policy."""
    sessions: Sessions
    pool: Pool
    security: Security
    models: ModelTable
    """The models that requests may name."""
    body_timeout_s: float
    """Longest time to receive a request body."""
    bodies: Bodies
    tenants: Tenants
    images: ImagePolicy = refuse
    omits_web_search: bool = False
    """As the setting `http.web_search`."""

    def claims(self, request: web.Request, *, scope: str = "session") -> Claims:
        """Returns the verified claims of a token with this scope; sets the labels of the call.
        Raises `Unauthenticated`, `PermissionDenied` or `InvalidArgument`."""
        key = request.match_info.get("token") or _key(request)
        token, labels = split_key(key)
        LABELS.set(with_headers(labels, request.headers))
        claims = request[CLAIMS] = self.security.verify(token, "GatewayService")
        bind_context(trajectory_id=claims.trajectory_id)
        begin_request_span(request, claims, route=route_of(request))
        if not claims.allows(scope):
            needed = scope.replace("|", " or ")
            raise PermissionDenied(f"the token of {claims.subject} is not a {needed} token")
        return claims

    def session_of(self, head: bytes) -> str:
        """Returns the trajectory of a request by its header; "" without a valid token."""
        target, _, lines = head.decode("latin-1").partition("\r\n")
        path = [*target.split(" "), ""][1]
        keys = [path.split("/")[2] if path.startswith("/s/") else ""]
        for line in lines.split("\r\n"):
            name, _, value = line.partition(":")
            if name.lower() in _KEY_HEADERS:
                keys.append(value.strip().removeprefix("Bearer ").removeprefix("bearer "))
        keys += re.findall(r"[?&]key=([^& ]+)", path)
        with suppress(ForgeError):
            token, _ = split_key(next(filter(None, keys), ""))
            return self.security.verify(token, "GatewayService").trajectory_id
        return ""

    async def read_body(self, request: web.Request) -> bytes:
        """Returns the body of a request, with U+FFFD for lone surrogates. Raises
        `HTTPRequestTimeout` for a late body, `BrokenBody` and `UnsupportedEncoding` for one that
        cannot be decompressed, `ResourceExhausted` and `RequestTooLarge` above limits."""
        claims = request[CLAIMS]
        check_encoding(request)
        self.tenants.check_size(claims.tenant, request.content_length or 0)
        try:
            async with asyncio.timeout(self.body_timeout_s):
                body = await self.bodies.read(request, claims.trajectory_id)
        except RequestPayloadError:
            encoding = request.headers.get("Content-Encoding", "")
            raise BrokenBody(
                f"the request body does not follow its Content-Encoding {encoding[:40]!r}"
            ) from None
        except TimeoutError:
            REFUSED.labels("body_timeout").inc()
            raise web.HTTPRequestTimeout(
                reason=f"the request body took over {self.body_timeout_s:g} s"
            ) from None
        # The length is unknown before, or that of a compressed body.
        self.tenants.check_size(claims.tenant, len(body))
        SIZE_BYTES.set(len(body))
        return without_lone_surrogates(body)

    @contextmanager
    def count_message(self, claims: Claims, size_bytes: int) -> Iterator[None]:
        """Counts a request without a body of its own, as over a WebSocket, for the length of a
        block. Raises `ResourceExhausted` and `RequestTooLarge` above limits."""
        self.tenants.check_size(claims.tenant, size_bytes)
        SIZE_BYTES.set(size_bytes)
        self.bodies.add(claims.trajectory_id, size_bytes)
        try:
            yield
        finally:
            self.bodies.remove(claims.trajectory_id, size_bytes)


def route_of(request: web.Request) -> str:
    """Returns the path of the route, without a session token."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Returns a JSON response."""
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        headers=headers,
        content_type="application/json",
    )


def sse(data: Any) -> bytes:
    """Returns one server-sent event without a name."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def typed_sse(data: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event that has its type as its name."""
    return f"event: {data['type']}\n".encode() + sse(data)


async def stream_events(
    request: web.Request,
    events: AsyncGenerator[bytes, None],
    *,
    error_event: Callable[[ForgeError], bytes],
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Sends server-sent events, one write per item of `events`.

    The response begins with the first event. An earlier error is raised and gets its status; a
    later one is sent as an event. Headers that come after the first event are sent as comments
    before the end, as `: NAME: VALUE`.
    """
    response = web.StreamResponse(headers=SSE_HEADERS)
    async with aclosing(events):
        try:
            async for event in events:
                if not response.prepared:
                    response.headers.update(headers)
                    await response.prepare(request)
                if isinstance(event, Ending):
                    late = [name for name in headers if name not in response.headers]
                    comments = "".join(f": {name}: {headers[name]}\n" for name in late)
                    await response.write_eof(comments.encode() + event)
                else:
                    await response.write(event)
        except Exception as error:
            # The response has not begun, or the client is gone.
            if not response.prepared or isinstance(error, ConnectionError):
                raise
            await response.write(error_event(public_error(error)))
    return response


def _key(request: web.Request) -> str:
    headers = request.headers
    kind, _, token = headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    key = headers.get("x-api-key") or headers.get("x-goog-api-key", "")
    if not key and speaks_google(request):
        key = request.query.get("key", "")
    if not key:
        raise Unauthenticated("no session token: send it as the API key")
    return key
