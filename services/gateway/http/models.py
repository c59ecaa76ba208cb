"""`GET /v1/models` with the one served model, in OpenAI's or Anthropic's format."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from forge.runtime.tokens import Claims
from services.gateway.http.edge import Edge, json_response
from services.gateway.http.errors import speaks_anthropic


class Models:
    """The endpoints for models."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._started_unix_s = int(time.time())

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """As `Endpoints.add_routes`."""
        router.add_get(f"{prefix}/v1/models", self._list)
        router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)

    async def _list(self, request: web.Request) -> web.Response:
        claims = self._edge.claims(request)
        if speaks_anthropic(request):
            model = self._anthropic(claims)
            page = {"has_more": False, "first_id": model["id"], "last_id": model["id"]}
            return json_response({"data": [model]} | page)
        return json_response({"object": "list", "data": [self._openai(claims)]})

    async def _model(self, request: web.Request) -> web.Response:
        claims = self._edge.claims(request)
        self._edge.check_model(request.match_info["model"])
        describe = self._anthropic if speaks_anthropic(request) else self._openai
        return json_response(describe(claims))

    def _openai(self, claims: Claims) -> dict[str, Any]:
        model = self._edge.turns.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "forge",
            "context_tokens": claims.context_limit(model.context_tokens),
        }

    def _anthropic(self, claims: Claims) -> dict[str, Any]:
        model = self._edge.turns.model
        return {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(self._started_unix_s, UTC).isoformat(),
            "max_input_tokens": claims.context_limit(model.context_tokens),
            "max_tokens": claims.context_limit(model.context_tokens),
        }
