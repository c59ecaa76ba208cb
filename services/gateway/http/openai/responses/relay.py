"""The Responses API of an external API, over a WebSocket connection of the agent.

The API is called over HTTP, as for any other request, and its events pass on as they are. The first
one has the headers of the response. Owns no connection: `socket` does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from forge.core.errors import Unavailable
from forge.runtime.security.tokens import Claims
from services.gateway.conversation.agent_time import Moment
from services.gateway.errors import ApiRejected, InvalidField
from services.gateway.external.api import ExternalApi
from services.gateway.http.edge import Edge
from services.gateway.http.errors import Failure, openai_error, public_error
from services.gateway.http.relay import Relay, is_stream

PATH = "/v1/responses"
_OF_THE_CONNECTION = ("type", "generate", "stream_id")
"""Fields of a client's event that are none of a request."""
Send = Callable[[str], Awaitable[None]]
"""Sends one event, as JSON."""


async def relay_response(
    edge: Edge,
    api: ExternalApi,
    text: bytes,
    *,
    claims: Claims,
    headers: Mapping[str, str],
    send: Send,
) -> None:
    """Calls the API with the client's event `text` and sends the events of its response. `headers`
    of the agent.

    Before the first event it raises the errors of `ExternalApi.post`; a later one is sent.
    """
    arrived = Moment.now()
    api.target(PATH)
    body = _body(text)
    async with edge.sessions.use_session(claims) as session:
        with edge.sessions.count_call(session), api.admit():
            relay, begun = Relay(session, api, body, path=PATH, arrived=arrived), False
            await relay.begin()
            try:
                async with aclosing(_events(api, relay, headers)) as events:
                    async for event in events:
                        await send(event if begun else _with_headers(event, relay.headers))
                        begun = True
            except Exception as error:
                if isinstance(error, ConnectionError) or (not begun and not _has_body(error)):
                    raise
                await send(json.dumps(error_event(error)))
            finally:
                relay.leave()


def error_event(error: Exception) -> dict[str, Any]:
    """Returns the event of an error, with the API's own body if it refuses the request."""
    failure = Failure.of(public_error(error))
    fields = {"type": "error", "status": failure.status, "headers": failure.headers}
    if isinstance(error, ApiRejected) and error.body:
        body: dict[str, Any] = json.loads(error.body)
        return fields | {"status": error.status} | body
    return fields | openai_error(failure)


async def _events(
    api: ExternalApi, relay: Relay, headers: Mapping[str, str]
) -> AsyncGenerator[str]:
    async with relay.call(headers) as upstream:
        if not is_stream(upstream):
            raise Unavailable(f"model {api.name!r}: its API does not answer with a stream")
        unfinished = b""
        async for piece in relay.stream(upstream):
            *lines, unfinished = (unfinished + piece).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield data.decode(errors="replace")


def _body(text: bytes) -> bytes:
    """Returns the request of a client's event."""
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    kind = bytes(fields.get("type", b"null"))[:60]
    if kind != b'"response.create"':
        raise InvalidField(
            f"events of type {kind.decode(errors='replace')} are not supported", param="type"
        )
    if bytes(fields.get("generate", b"null")).strip() == b"false":
        raise InvalidField(
            "generate: false is not supported for an external API: send the input with the request",
            param="generate",
        )
    for name in _OF_THE_CONNECTION:
        fields.pop(name, None)
    fields["stream"] = msgspec.Raw(b"true")
    return msgspec.json.encode(fields)


def _with_headers(event: str, headers: Mapping[str, str]) -> str:
    try:
        fields = msgspec.json.decode(event, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return event
    fields["headers"] = msgspec.Raw(msgspec.json.encode(dict(headers)))
    return msgspec.json.encode(fields).decode()


def _has_body(error: Exception) -> bool:
    return isinstance(error, ApiRejected) and bool(error.body)
