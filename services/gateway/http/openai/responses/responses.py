"""OpenAI's Responses API over HTTP: creates, retrieves and deletes responses.

Owns the endpoints; `turn` makes a response, `recall` finds an earlier one, and
`socket` serves WebSocket connections to the same path.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from forge.core.errors import ForgeError, InvalidArgument
from services.gateway.actors.messages import Forget
from services.gateway.conversation.handles import deletion
from services.gateway.errors import UnknownResponse
from services.gateway.http.edge import Endpoints, json_response, stream_events, typed_sse
from services.gateway.http.errors import Failure
from services.gateway.http.forward import ModelRequest, served_or_forwarded
from services.gateway.http.openai.fields import RESPONSES
from services.gateway.http.openai.responses.events import Events
from services.gateway.http.openai.responses.items import response_key
from services.gateway.http.openai.responses.recall import recall, stored_response
from services.gateway.http.openai.responses.schema import ResponsesRequest
from services.gateway.http.openai.responses.socket import ResponsesSocket
from services.gateway.http.openai.responses.turn import Response, draft_of, failure_events
from services.gateway.http.request_fields.parameters import decode_request
from services.gateway.turns.record import ASK_TIMEOUT_S


class Responses(Endpoints):
    """The endpoints below `/v1/responses`."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the routes of responses: create, connect, retrieve, delete."""
        path = "/v1/responses"
        handler = served_or_forwarded(
            self._edge, path, self._create, error_events=lambda _: _last_event
        )
        router.add_post(f"{prefix}{path}", handler)
        router.add_get(f"{prefix}/v1/responses", self._connect, allow_head=False)
        router.add_get(f"{prefix}/v1/responses/{{response}}", self._retrieve)
        router.add_delete(f"{prefix}/v1/responses/{{response}}", self._delete)

    async def _create(self, request: ModelRequest) -> web.StreamResponse:
        edge, claims = self._edge, request.claims
        asked, headers = decode_request(request.body, ResponsesRequest, RESPONSES)
        draft = await draft_of(asked, edge, claims, request.arrived, headers)
        async with edge.sessions.use_session(claims) as session:
            response = await draft.response(edge, session)
            if not draft.turn.stream:
                return json_response(await response.complete(), headers=headers)
            events = Events(draft.head)
            return await stream_events(
                request.http,
                _sent(response, events),
                error_event=lambda error: b"".join(map(typed_sse, failure_events(events, error))),
                headers=headers,
            )

    async def _connect(self, request: web.Request) -> web.StreamResponse:
        return await ResponsesSocket(self._edge, request).serve()

    async def _retrieve(self, request: web.Request) -> web.Response:
        if request.query.get("stream") == "true":
            raise InvalidArgument("stream is not supported: a stored response is complete")
        response_id = request.match_info["response"]
        key = response_key(response_id)
        async with self._edge.sessions.use_session(self._edge.claims(request)) as session:
            recalled = await recall(session, key)
            if recalled is None:
                raise UnknownResponse(f"Response with id {response_id[:100]!r} not found.")
            return json_response(stored_response(recalled, key, self._edge.turns.model))

    async def _delete(self, request: web.Request) -> web.Response:
        response_id = request.match_info["response"]
        name = response_key(response_id)
        claims = self._edge.claims(request)
        async with self._edge.sessions.use_session(claims) as session:
            if await recall(session, name) is None:
                raise UnknownResponse(f"Response with id {response_id[:100]!r} not found.")
            await self._edge.pool.annotate(claims, [deletion(name)])
            await session.actor.ask(Forget(name=name), timeout_s=ASK_TIMEOUT_S)
        return json_response({"id": response_id, "object": "response", "deleted": True})


def _last_event(error: ForgeError) -> bytes:
    """Returns the event of a failed response that an external API has begun."""
    failure = Failure.of(error)
    fields = {"code": failure.code, "message": failure.message, "param": failure.param}
    return typed_sse({"type": "error", **fields})


async def _sent(response: Response, events: Events) -> AsyncGenerator[bytes, None]:
    """Yields the events of a response as server-sent events."""
    async with aclosing(response.events(events)) as made:
        async for event in made:
            yield typed_sse(event)
