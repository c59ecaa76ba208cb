"""`POST /v1/embeddings`, of external APIs alone: engines of this cluster have none."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from services.gateway.conversation.agent_time import Moment
from services.gateway.errors import InvalidField
from services.gateway.http.edge import Endpoints
from services.gateway.http.forward import ModelRequest, external_of, forward
from services.gateway.http.request_fields import request_body


class EmbeddingsRequest(msgspec.Struct):
    """The body of a request; its other fields pass as they are."""

    model: str
    input: str | list[Any]


class Embeddings(Endpoints):
    """The endpoint."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the route of embeddings."""
        router.add_post(f"{prefix}/v1/embeddings", self._create)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        arrived, edge = Moment.now(), self._edge
        claims = edge.claims(request)
        body = await edge.read_body(request)
        asked = request_body.decode(body, EmbeddingsRequest)
        api = external_of(edge, claims, body)
        if api is None:
            edge.models.find(claims, asked.model)
            raise InvalidField(
                f"model {asked.model[:100]!r} has no embeddings here; models of kind embeddings "
                "in the gateway's settings have",
                param="model",
            )
        call = ModelRequest(http=request, claims=claims, body=body, arrived=arrived)
        return await forward(edge, call, api, "/v1/embeddings")
