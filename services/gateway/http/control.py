"""Forge's own endpoint: an agent that ends its rollout itself."""

from __future__ import annotations

from aiohttp import web

from services.gateway.close_session import close_session
from services.gateway.http import request_body
from services.gateway.http.edge import Edge, json_response
from services.gateway.http.openai import chat_schema


class Control:
    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        router.add_post(f"{prefix}/v1/forge/close", self._close)

    async def _close(self, request: web.Request) -> web.Response:
        edge = self._edge
        claims = edge.claims(request)
        asked = request_body.decode(await request.read(), chat_schema.CloseRequest)
        async with edge.sessions.use(claims) as session:
            summary = await close_session(
                edge.sessions,
                edge.pool,
                session,
                rewards=chat_schema.rewards_of(asked),
                abandon_reason=asked.abandon_reason,
                min_turns=asked.min_turns,
                after_agent_s=asked.after_agent_s,
            )
        return json_response({"turns": summary.turns, "sampled_tokens": summary.sampled_tokens})
