"""`GET /v1/models` with the names that a session may use, in the form of one of three protocols.

An answer has the name that its request used, so a client finds both in the list.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from forge.runtime.security.tokens import Claims
from services.gateway.external.api import ExternalApi
from services.gateway.http.edge import Edge, Endpoints, json_response
from services.gateway.http.errors import speaks_anthropic, speaks_google
from services.gateway.turns.run import Turns


class Models(Endpoints):
    """The endpoints for models."""

    def __init__(self, edge: Edge) -> None:
        super().__init__(edge)
        self._started_unix_s = int(time.time())

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the routes of the list of models and of one model."""
        for version in ("v1", "v1beta"):
            router.add_get(f"{prefix}/{version}/models", self._list)
            router.add_get(f"{prefix}/{version}/models/{{model:.+}}", self._model)

    async def _list(self, request: web.Request) -> web.Response:
        claims = self._edge.claims(request)
        usable = self._edge.models.usable(claims)
        models = [self._described(request, claims, name, model) for name, model in usable]
        if speaks_google(request):
            return json_response({"models": models})
        if speaks_anthropic(request):
            page = {"has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
            return json_response({"data": models} | page)
        return json_response({"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.Response:
        claims = self._edge.claims(request)
        name = request.match_info["model"]
        model = self._edge.models.find(claims, name)
        return json_response(self._described(request, claims, name, model))

    def _described(
        self, request: web.Request, claims: Claims, name: str, model: Turns | ExternalApi
    ) -> dict[str, Any]:
        """`max_input_tokens` and the like are 0 for external APIs, whose limits are unknown."""
        if isinstance(model, ExternalApi):
            limit, shown = 0, name
        else:
            limit, shown = model.context_limit(claims), model.model.name
        if speaks_google(request):
            return self._google(name, shown, limit)
        if speaks_anthropic(request):
            return self._anthropic(name, shown, limit)
        return self._openai(name, limit)

    def _google(self, name: str, shown: str, limit: int) -> dict[str, Any]:
        return {
            "name": f"models/{name}",
            "baseModelId": name,
            "version": "1",
            "displayName": shown,
            "inputTokenLimit": limit,
            "outputTokenLimit": limit,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }

    def _openai(self, name: str, limit: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "forge",
        } | ({"context_tokens": limit} if limit else {})

    def _anthropic(self, name: str, shown: str, limit: int) -> dict[str, Any]:
        return {
            "type": "model",
            "id": name,
            "display_name": shown,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(self._started_unix_s, UTC).isoformat(),
            "max_input_tokens": limit,
            "max_tokens": limit,
        }
