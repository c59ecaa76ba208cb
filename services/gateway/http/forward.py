"""Passes requests for external APIs through, complete or streamed, and records their answers.

Owns the relay. `services.gateway.external` owns the calls; the bodies are the agent's and the API's
own. A stream that ends before its last event ends with an error event of its protocol.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

from forge.core.errors import DeadlineExceeded, ForgeError, Unavailable
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway.actors.messages import BeginOther, EndOther
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.call_labels import LABELS
from services.gateway.errors import ApiRejected, SessionClosed
from services.gateway.external.answer import Answer, called_turn
from services.gateway.external.api import ExternalApi
from services.gateway.http.edge import SSE_HEADERS, Edge
from services.gateway.http.errors import failure_headers, public_error
from services.gateway.metrics import OTHER_FAILURES
from services.gateway.sessions import Session
from services.gateway.turns.record import ASK_TIMEOUT_S
from services.gateway.turns.run import MODEL_HEADER, TURN_HEADER

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
            relay = _Relay(session, api, body, path=path, arrived=arrived, error_event=error_event)
            if recorded:
                await relay.begin()
            try:
                return await relay.run(request)
            except ApiRejected as error:
                return _rejection(error)
            finally:
                relay.leave()


class _Relay:
    """One call."""

    def __init__(
        self,
        session: Session,
        api: ExternalApi,
        body: bytes,
        *,
        path: str,
        arrived: Moment,
        error_event: ErrorEvent,
    ) -> None:
        self._session, self._api, self._body = session, api, body
        self._path, self._arrived, self._error_event = path, arrived, error_event
        self._call_id = uuid.uuid4().hex
        self._deadline = _Deadline(api)
        self._recorded = False
        """Whether the session knows of the call and not of its end."""
        self._answer: Answer | None = None

    async def begin(self) -> None:
        """Begins the call in the session."""
        begin = BeginOther(call_id=self._call_id, abort=self._deadline.abort, arrived=self._arrived)
        await self._session.actor.ask(begin, timeout_s=ASK_TIMEOUT_S)
        self._recorded = True

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Calls the API and answers the request."""
        response: web.StreamResponse | None = None
        try:
            async with (
                self._deadline,
                self._api.post(self._path, self._body, request.headers) as upstream,
            ):
                streamed = upstream.content_type == "text/event-stream"
                self._answer = Answer(streamed=streamed, recorded_bytes=self._api.recorded_bytes)
                if not streamed:
                    return await self._complete(upstream)
                response = web.StreamResponse(headers=SSE_HEADERS | self._headers())
                await self._stream(request, upstream, response)
        except Exception as error:
            # The response has not begun, or the agent is gone.
            if response is None or not response.prepared or isinstance(error, ConnectionError):
                raise
            await response.write(self._error_event(public_error(error)))
        return response

    def leave(self) -> None:
        """Records the part of an answer that came, unless the whole of it is on record."""
        if self._recorded:
            self._recorded = False
            self._session.actor.tell(self._end(whole=False))

    async def _complete(self, upstream: Any) -> web.Response:
        assert self._answer is not None
        content = bytearray()
        async for piece in self._api.pieces(upstream):
            self._answer.add(piece)
            content += piece
        self._answer.read_usage(bytes(content))
        headers = self._headers() | await self._record()
        return web.Response(
            body=bytes(content),
            status=upstream.status,
            headers=headers,
            content_type=upstream.content_type,
        )

    async def _stream(
        self, request: web.Request, upstream: Any, response: web.StreamResponse
    ) -> None:
        answer = self._answer
        assert answer is not None
        async for piece in self._api.pieces(upstream):
            if not response.prepared:
                await response.prepare(request)
            last = answer.add(piece)
            if last is not None:
                named = "".join(f": {n}: {v}\n" for n, v in (await self._record()).items())
                piece = piece[:last] + named.encode() + piece[last:]
            await response.write(piece)
        if not answer.ended:
            OTHER_FAILURES.labels(self._api.name, "cut").inc()
            raise Unavailable(f"model {self._api.name!r}: its API ended in mid-answer")
        await self._record()
        await response.write_eof()

    async def _record(self) -> dict[str, str]:
        """Records the whole answer, once; returns the header with its turn."""
        if not self._recorded:
            return {}
        self._recorded = False
        # Shielded: an agent that leaves at this moment must not cancel the record.
        ending = self._session.actor.ask(self._end(whole=True), timeout_s=ASK_TIMEOUT_S)
        turn_index: int = await asyncio.shield(asyncio.ensure_future(ending))
        if turn_index < 0:
            raise SessionClosed("the session was closed during this call")
        return {TURN_HEADER: str(turn_index)}

    def _end(self, *, whole: bool) -> EndOther:
        turn: common_pb2.Turn | None = None
        if self._answer is not None:
            turn = called_turn(
                self._api.name,
                self._api.kind,
                self._body,
                self._answer,
                recorded_bytes=self._api.recorded_bytes,
                whole=whole,
            )
            turn.agent = LABELS.get().agent
        return EndOther(call_id=self._call_id, arrived=self._arrived, turn=turn)

    def _headers(self) -> dict[str, str]:
        return {MODEL_HEADER: self._api.name}


class _Deadline:
    """The longest time of a call; `abort` ends the call at once."""

    def __init__(self, api: ExternalApi) -> None:
        self._api = api
        self._timeout = asyncio.timeout(api.timeout_s)
        self._entered = self._aborted = False

    async def __aenter__(self) -> None:
        if self._aborted:
            raise self._late()
        await self._timeout.__aenter__()
        self._entered = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered = False
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._late() from None

    def abort(self) -> None:
        """Ends the call."""
        self._aborted = True
        if self._entered:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def _late(self) -> ForgeError:
        if self._aborted:
            return SessionClosed("the session was closed during this call")
        OTHER_FAILURES.labels(self._api.name, "timeout").inc()
        return DeadlineExceeded(
            f"model {self._api.name!r}: its API did not finish within {self._api.timeout_s:g} s"
        )


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
