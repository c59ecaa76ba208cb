"""A gateway's HTTP server over scripted turns, without sessions or a router."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from structlog.testing import capture_logs

from forge.core.conversation.messages import Message
from forge.core.formats import TextDelta
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway.config import ConnectionSettings
from services.gateway.conversation.prompt import SampledAnswer
from services.gateway.http.edge import Edge
from services.gateway.http.server import HttpServer
from services.gateway.model_table import ModelTable
from services.gateway.turns.run import Turns
from services.gateway.turns.types import Piece, Turn
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.limits import EdgeLimits, edge_limits


class ScriptedTurns:
    """Gives what it is told to, in order: texts as pieces, errors as errors, then the turn."""

    model = make_model("chatml")
    other = None
    context_limit = Turns.context_limit
    finish_turn = Turns.finish_turn

    def __init__(self) -> None:
        self.script: Sequence[str | Exception] = ()
        self.runs = 0

    async def run_turn(self, session: Any, request: Any) -> AsyncGenerator[Piece | Turn]:
        self.runs += 1
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            deltas = [TextDelta(text=step)] if step else []
            yield Piece(
                deltas=deltas,
                tokens=common_pb2.SampledTokens(),
                ids=b"",
                prompt_ids=bytes(20),
                prompt_tokens=5,
            )
        message = Message(role="assistant", content="".join(map(str, self.script)))
        sampled = SampledAnswer(
            columns=common_pb2.SampledTokens(ids=b"", logprobs=b"", weight_versions=b""),
            finish_reason=common_pb2.FINISH_REASON_STOP,
            answer=message,
        )
        yield Turn(
            turn_index=0,
            message=message,
            prefill="",
            prompt_ids=bytes(20),
            sampled=sampled,
            prompt_tokens=5,
            stop_text="",
            tokens=common_pb2.SampledTokens,
            token_logprobs=list,
        )


class AnySession:
    @asynccontextmanager
    async def use_session(self, claims: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(claims=claims)


@asynccontextmanager
async def served(
    turns: ScriptedTurns,
    *,
    max_body_bytes: int = 1 << 20,
    connections: ConnectionSettings | None = None,
    limits: EdgeLimits | None = None,
) -> AsyncIterator[str]:
    """Where it listens; any key is a session's."""
    claims = Claims(subject="s", scopes=frozenset({"session"}), trajectory_id="t:0:0")
    connections = connections or ConnectionSettings()
    security = SimpleNamespace(verify=lambda token, service: claims, http_context=lambda host: None)
    edge = Edge(
        turns=cast(Any, turns),
        sessions=cast(Any, AnySession()),
        pool=cast(Any, None),
        security=cast(Any, security),
        models=ModelTable(cast(Any, turns), (turns.model.name,)),
        body_timeout_s=connections.body_timeout_s,
        **(limits or edge_limits()),
    )
    server = HttpServer(edge, max_body_bytes=max_body_bytes, connections=connections)
    # Captured, as a traceback takes seconds to be printed well.
    with capture_logs():
        port = await server.start("127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await server.stop()
