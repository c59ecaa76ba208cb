"""OpenAI's Responses API over WebSocket: one connection, one response after the other.

A client sends `response.create` events with the fields of a request and receives the events of its
response. A request may continue the latest response of its connection, also one with
`store: false`, and sends only its new items. With `generate: false` a response has no output: it
keeps its items for the next request.

An error before the first event of a response is an `error` event with the status that HTTP would
have. The connection stays open after it, unless the token is refused.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from forge.core.errors import PermissionDenied, Unauthenticated
from forge.runtime.security.tokens import Claims
from services.gateway.conversation.agent_time import Moment
from services.gateway.errors import InvalidField
from services.gateway.external.api import ExternalApi
from services.gateway.http.edge import Edge
from services.gateway.http.errors import Failure, openai_error, public_error
from services.gateway.http.forward import external_of
from services.gateway.http.openai.fields import RESPONSES
from services.gateway.http.openai.responses.events import Event, Events
from services.gateway.http.openai.responses.history import items_of
from services.gateway.http.openai.responses.items import response_key
from services.gateway.http.openai.responses.relay import relay_response
from services.gateway.http.openai.responses.schema import ResponsesRequest
from services.gateway.http.openai.responses.turn import CheckedRequest, draft_of, failure_events
from services.gateway.http.request_fields.parameters import decode_request
from services.gateway.http.request_fields.request_body import without_lone_surrogates
from services.gateway.metrics import REQUESTS

HEARTBEAT_S = 30.0
"""Interval of pings; a peer that does not answer within half of it is gone."""
_BOOKKEEPING = frozenset({"response.processed"})
"""Events of clients that need no answer."""


class ClientEvent(ResponsesRequest, kw_only=True):
    """An event of the client."""

    type: str
    model: str = ""
    generate: bool | None = None
    stream_id: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Warm:
    """The request of a response without output; its bytes count as those of a body."""

    session: str
    previous_response_id: str | None
    input: bytes
    known: frozenset[str]


class ResponsesSocket:
    """One connection."""

    def __init__(self, edge: Edge, request: web.Request) -> None:
        self._edge = edge
        self._request = request
        # Compression takes more time than it saves: an event is as small as a token.
        self._socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, compress=False, max_msg_size=request.client_max_size
        )
        self._latest = ""
        """Key of the latest response; "" if it failed."""
        self._warm: _Warm | None = None
        """The request of the latest response, if that has no output."""

    async def serve(self) -> web.WebSocketResponse:
        """Serves the connection to its end. Raises `HTTPUpgradeRequired` for a request over HTTP,
        and the errors of a refused token."""
        self._edge.claims(self._request)
        if not self._socket.can_prepare(self._request):
            raise web.HTTPUpgradeRequired(reason="GET opens a WebSocket connection; or use POST")
        await self._socket.prepare(self._request)
        reading = asyncio.create_task(self._socket.receive())
        try:
            while (message := await reading).type is WSMsgType.TEXT:
                reading = asyncio.create_task(self._socket.receive())
                if not await self._answer(message, reading):
                    break
        finally:
            self._keep(None)
            reading.cancel()
            await asyncio.wait({reading})
        binary = message.type is WSMsgType.BINARY
        await self._socket.close(code=WSCloseCode.UNSUPPORTED_DATA if binary else WSCloseCode.OK)
        return self._socket

    async def _answer(self, message: WSMessage, reading: asyncio.Task[WSMessage]) -> bool:
        """Answers a message; returns False to end the connection. A client that closes it aborts
        the response."""
        answering = asyncio.create_task(self._respond(message.data))
        try:
            await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and reading.result().type is not WSMsgType.TEXT:
                return False
            return await answering
        finally:
            answering.cancel()
            await asyncio.wait({answering})

    async def _respond(self, text: str) -> bool:
        try:
            claims = self._edge.claims(self._request)
            raw = without_lone_surrogates(text.encode())
            with self._edge.count_message(claims, len(raw)):
                if (api := external_of(self._edge, claims, raw)) is not None:
                    await self._relay(claims, api, raw)
                    return True
                asked, headers = decode_request(raw, ClientEvent, RESPONSES)
                if asked.type not in _BOOKKEEPING:
                    await self._create(claims, asked, headers)
                    REQUESTS.labels("websocket", "200").inc()
        except ConnectionError:
            return False
        except Exception as error:
            refusal = public_error(error)
            failure = Failure.of(refusal)
            REQUESTS.labels("websocket", str(failure.status)).inc()
            fields = {"status": failure.status, "headers": failure.headers}
            await self._send({"type": "error", **fields, **openai_error(failure)})
            return not isinstance(refusal, Unauthenticated | PermissionDenied)
        return True

    async def _relay(self, claims: Claims, api: ExternalApi, raw: bytes) -> None:
        # The API itself knows its earlier responses.
        self._latest = ""
        self._keep(None)
        await relay_response(
            self._edge,
            api,
            raw,
            claims=claims,
            headers=self._request.headers,
            send=self._socket.send_str,
        )
        REQUESTS.labels("websocket", "200").inc()

    async def _create(self, claims: Claims, asked: ClientEvent, headers: dict[str, str]) -> None:
        arrived = Moment.now()
        _check(asked)
        known = self._continue(asked)
        # A response that fails cannot be continued.
        self._latest = ""
        self._keep(None)
        draft = await draft_of(asked, self._edge, claims, arrived, headers, names_all=True)
        if asked.generate is False:
            await self._warm_up(claims, asked, draft, known)
        elif await self._generate(claims, draft, known):
            self._latest = draft.head.key

    def _continue(self, asked: ClientEvent) -> frozenset[str]:
        """Replaces the id of a response without output by its request; returns the keys of
        responses that this request may continue although they are not stored."""
        warm = self._warm
        previous = response_key(asked.previous_response_id or "")
        if warm is None or not previous or previous != self._latest:
            return frozenset({self._latest})
        asked.previous_response_id = warm.previous_response_id
        joined = _joined(warm.input, bytes(asked.input))
        if len(joined) > self._request.client_max_size:
            raise InvalidField(
                f"input has {len(joined)} bytes with that of the previous response; at most "
                f"{self._request.client_max_size}",
                param="input",
            )
        asked.input = msgspec.Raw(joined)
        return warm.known

    async def _warm_up(
        self, claims: Claims, asked: ClientEvent, draft: CheckedRequest, known: frozenset[str]
    ) -> None:
        given = bytes(asked.input)
        if _inner(given):
            async with self._edge.sessions.use_session(claims) as session:
                response = await draft.response(self._edge, session, known=known)
                # An invalid item is an error now, not in the next request.
                len(response.request.messages)
        previous, session_id = asked.previous_response_id, claims.trajectory_id
        self._keep(
            _Warm(session=session_id, previous_response_id=previous, input=given, known=known)
        )
        events = Events(draft.head)
        for event in (*events.start(), *events.finish_without_output()):
            await self._send(event)
        self._latest = draft.head.key

    def _keep(self, warm: _Warm | None) -> None:
        """Replaces the kept request. Raises `ResourceExhausted` without memory for it."""
        bodies, before = self._edge.bodies, self._warm
        self._warm = None
        if before is not None:
            bodies.remove(before.session, len(before.input))
        if warm is not None:
            bodies.add(warm.session, len(warm.input))
            self._warm = warm

    async def _generate(self, claims: Claims, draft: CheckedRequest, known: frozenset[str]) -> bool:
        """Sends the events of a response; returns False if it failed."""
        events, begun, ok = Events(draft.head, one_end=True), False, True
        async with self._edge.sessions.use_session(claims) as session:
            response = await draft.response(self._edge, session, known=known)
            try:
                async with aclosing(response.events(events)) as made:
                    async for event in made:
                        if not begun and draft.turn.headers:
                            event = event | {"headers": draft.turn.headers}
                        begun, ok = True, event["type"] != "response.failed"
                        await self._send(event)
            except Exception as error:
                if not begun or isinstance(error, ConnectionError):
                    raise
                for event in failure_events(events, public_error(error)):
                    await self._send(event)
                return False
        return ok

    async def _send(self, event: Event) -> None:
        await self._socket.send_str(msgspec.json.encode(event).decode())


def _check(asked: ClientEvent) -> None:
    """Raises `InvalidArgument` for an event that is not supported."""
    if asked.type != "response.create":
        raise InvalidField(
            f"events of type {asked.type[:40]!r} are not supported; 'response.create' is",
            param="type",
        )
    if asked.stream_id is not None:
        raise InvalidField(
            "stream_id is not supported: a connection has one response at a time; "
            "open another for a parallel one",
            param="stream_id",
        )
    asked.stream = True


def _joined(before: bytes, new: bytes) -> bytes:
    """Returns two inputs as one array of items."""
    return b"[" + b",".join(filter(None, (_inner(before), _inner(new)))) + b"]"


def _inner(given: bytes) -> bytes:
    """Returns the items of an input without the brackets around them."""
    array = given.strip()
    if array.startswith(b"["):
        return array[1:-1].strip()
    if array == b"null":
        return b""
    return msgspec.json.encode({"role": "user", "content": items_of(array)})
