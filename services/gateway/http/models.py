"""`GET /v1/models` with all names of the served model, in OpenAI's, Anthropic's or Google's format.

An answer has the name that its request used, so a client finds both in the list.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from forge.runtime.security.tokens import Claims
from services.gateway.http.edge import Edge, json_response
from services.gateway.http.errors import speaks_anthropic, speaks_google


class Models:
    """The endpoints for models."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._started_unix_s = int(time.time())

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """As `Endpoints.add_routes`."""
        for version in ("v1", "v1beta"):
            router.add_get(f"{prefix}/{version}/models", self._list)
            router.add_get(f"{prefix}/{version}/models/{{model:.+}}", self._model)

    async def _list(self, request: web.Request) -> web.Response:
        claims = self._edge.claims(request)
        names = [name for name in self._edge.model_names if name != "*"]
        models = [self._described(request, claims, name) for name in names]
        if speaks_google(request):
            return json_response({"models": models})
        if speaks_anthropic(request):
            page = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
            return json_response({"data": models} | page)
        return json_response({"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.Response:
        claims = self._edge.claims(request)
        name = request.match_info["model"]
        self._edge.check_model(name)
        return json_response(self._described(request, claims, name))

    def _described(self, request: web.Request, claims: Claims, name: str) -> dict[str, Any]:
        if speaks_google(request):
            return self._google(claims, name)
        describe = self._anthropic if speaks_anthropic(request) else self._openai
        return describe(claims, name)

    def _google(self, claims: Claims, name: str) -> dict[str, Any]:
        model = self._edge.turns.model
        limit = claims.context_limit(model.context_tokens)
        return {
            "name": f"models/{name}",
            "baseModelId": name,
            "version": "1",
            "displayName": model.name,
            "inputTokenLimit": limit,
            "outputTokenLimit": limit,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }

    def _openai(self, claims: Claims, name: str) -> dict[str, Any]:
        model = self._edge.turns.model
        return {
            "id": name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "forge",
            "context_tokens": claims.context_limit(model.context_tokens),
        }

    def _anthropic(self, claims: Claims, name: str) -> dict[str, Any]:
        model = self._edge.turns.model
        return {
            "type": "model",
            "id": name,
            "display_name": model.name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(self._started_unix_s, UTC).isoformat(),
            "max_input_tokens": claims.context_limit(model.context_tokens),
            "max_tokens": claims.context_limit(model.context_tokens),
        }
