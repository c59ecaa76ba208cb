"""`POST /v1/forge/close`: ends a rollout; called by its agent or grader."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from forge.core.credit.rewards import RewardKind
from forge.v1 import common_pb2
from services.gateway.close_session import close_session
from services.gateway.http.edge import Endpoints, json_response
from services.gateway.http.request_fields import request_body


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """A reward component of the request."""

    name: str
    value: float
    kind: RewardKind = "outcome"
    turn_index: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1
    event_id: str = ""


class CloseRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of the request. An unknown field is an error: after a misspelt one, rewards would be
    missing in a sealed trajectory for good."""

    rewards: list[RewardBody] = []
    abandon_reason: str = ""
    min_turns: int = 0
    after_agent_s: float = 0.0


def rewards_of(request: CloseRequest) -> list[common_pb2.RewardEvent]:
    """Returns the reward events of the request."""
    return [
        common_pb2.RewardEvent(
            event_id=reward.event_id or f"{reward.kind}-{reward.name}-{reward.turn_index}",
            name=reward.name,
            kind=common_pb2.RewardKind.Value(f"REWARD_KIND_{reward.kind.upper()}"),
            value=reward.value,
            turn_index=reward.turn_index,
        )
        for reward in request.rewards
    ]


class Control(Endpoints):
    """The endpoint of Forge."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Adds the route of `/v1/forge/close`."""
        router.add_post(f"{prefix}/v1/forge/close", self._close)

    async def _close(self, request: web.Request) -> web.Response:
        edge = self._edge
        claims = edge.claims(request, scope="session|grader")
        asked = request_body.decode(await edge.read_body(request), CloseRequest)
        async with edge.sessions.use_session(claims) as session:
            summary = await close_session(
                edge.sessions,
                edge.pool,
                session,
                claims,
                rewards=rewards_of(asked),
                abandon_reason=asked.abandon_reason,
                min_turns=asked.min_turns,
                after_agent_s=asked.after_agent_s,
            )
        return json_response({"turns": summary.turns, "sampled_tokens": summary.sampled_tokens})
