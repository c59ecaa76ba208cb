"""`GET /openapi.json`: the OpenAPI document of the gateway's routes.

Owns the request body of each route; the schemas are the protocols' own structs. Answers have the
formats of OpenAI, Anthropic and Gemini; their schemas are not repeated here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import hdrs, web

from services.gateway.http import control, embeddings, tokens
from services.gateway.http.anthropic import history, schema
from services.gateway.http.edge import Endpoints, json_response
from services.gateway.http.gemini import history as gemini_history
from services.gateway.http.gemini import schema as gemini_schema
from services.gateway.http.openai.completions import chat_schema, completions_schema
from services.gateway.http.openai.responses import schema as responses_schema

BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": chat_schema.ChatCompletionRequest,
    "/v1/completions": completions_schema.CompletionRequest,
    "/v1/responses": responses_schema.ResponsesRequest,
    "/v1/messages": schema.MessagesRequest,
    "/v1/messages/count_tokens": schema.CountTokensRequest,
    "/v1/embeddings": embeddings.EmbeddingsRequest,
    "/tokenize": tokens.TokenizeRequest,
    "/detokenize": tokens.DetokenizeRequest,
    "/v1beta/models/{model}:generateContent": gemini_schema.GenerateContentRequest,
    "/v1/models/{model}:generateContent": gemini_schema.GenerateContentRequest,
    "/v1beta/models/{model}:streamGenerateContent": gemini_schema.GenerateContentRequest,
    "/v1/models/{model}:streamGenerateContent": gemini_schema.GenerateContentRequest,
    "/v1beta/models/{model}:countTokens": gemini_schema.CountTokensRequest,
    "/v1/models/{model}:countTokens": gemini_schema.CountTokensRequest,
    "/v1/forge/close": control.CloseRequest,
}
"""Request body of each POST, by its path without `/s/{token}`."""

_ANTHROPIC = {
    "messages": list[history.InputMessage],
    "system": str | list[history.Block] | None,
}
_GEMINI = {
    "contents": list[gemini_history.Content],
    "systemInstruction": gemini_history.Content | None,
}
_LATE: Mapping[type[msgspec.Struct], Mapping[str, Any]] = {
    chat_schema.ChatCompletionRequest: {"messages": list[chat_schema.ChatMessage]},
    tokens.TokenizeRequest: {"messages": list[chat_schema.ChatMessage] | None},
    responses_schema.ResponsesRequest: {"input": str | list[dict[str, Any]]},
    schema.MessagesRequest: _ANTHROPIC,
    schema.CountTokensRequest: _ANTHROPIC,
    gemini_schema.GenerateContentRequest: _GEMINI,
    gemini_schema.CountTokensRequest: _GEMINI,
}
"""Fields that are decoded later, with their types."""


_OBJECT = {"schema": {"type": "object"}}
_ERRORS: Mapping[str, str] = {
    "400": "A field is wrong, or the prompt is too long",
    "401": "No session token, or an invalid one",
    "403": "The token is not a session token, or may not do this",
    "404": "Unknown path, model or response",
    "405": "The path has no such method",
    "408": "The body did not arrive in time",
    "409": "The session is closed, or has an outcome",
    "413": "The request is too large",
    "429": "A limit is reached; Retry-After has a hint",
    "502": "An external API refuses the operator's key, or answers otherwise than it should",
    "503": "No router, no pool shard, or draining; Retry-After has a hint",
    "504": "The answer took too long",
}
"""Statuses of errors; their objects have the format of the protocol."""


class OpenApi(Endpoints):
    """`GET /openapi.json`, for any session token."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the route of the OpenAPI document."""
        router.add_get(f"{prefix}/openapi.json", self._document)

    async def _document(self, request: web.Request) -> web.Response:
        self._edge.claims(request)
        return json_response(document(request.app.router.routes()))


def document(routes: Iterable[web.AbstractRoute]) -> dict[str, Any]:
    """Returns the OpenAPI document of routes."""
    schemas, components = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.resource is not None and route.method != hdrs.METH_HEAD:
            path = route.resource.canonical
            operation = _operation(path, schemas.get(path.removeprefix("/s/{token}")))
            paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forge gateway", "version": "v1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "google": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
            },
        },
    }


def _operation(path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    operation: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ],
        "responses": _responses(path, streams=body is not None),
        "security": []
        if path == "/healthz" or "token" in names
        else [{"bearer": []}, {"key": []}, {"google": []}],
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    return operation


def _responses(path: str, *, streams: bool) -> dict[str, Any]:
    """Returns the responses of an operation by status; `streams`: it may send events."""
    kinds = {"application/json": _OBJECT}
    # Without alt=sse, Gemini's stream is one array.
    array = {"application/json": {"schema": {"type": "array"}}}
    answer = array if path.endswith(":streamGenerateContent") else kinds
    answer = answer | ({"text/event-stream": {}} if streams else {})
    found: dict[str, Any] = {"200": {"description": "The answer", "content": answer}}
    for status, description in _ERRORS.items():
        found[status] = {"description": description, "content": kinds}
    if path.endswith("/v1/responses"):
        found["101"] = {"description": "A WebSocket connection"}
        found["426"] = {"description": "GET without a WebSocket", "content": kinds}
    return found


def _schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the content of each body by path, and the schemas of all structs by name."""
    late = [(kind, name, form) for kind in _LATE for name, form in _LATE[kind].items()]
    schemas, components = msgspec.json.schema_components(
        [*BODIES.values(), *(form for _, _, form in late)],
        ref_template="#/components/schemas/{name}",
    )
    references = dict(zip(BODIES.values(), schemas, strict=False))
    for (kind, name, _), form in zip(late, schemas[len(BODIES) :], strict=True):
        struct = components[references[kind]["$ref"].rpartition("/")[2]]
        struct["properties"][name] = form
    return {path: {"schema": references[kind]} for path, kind in BODIES.items()}, components
