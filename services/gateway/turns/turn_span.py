"""The span of one model call, by OpenTelemetry's semantic conventions for generative AI.

It has numbers and names, and never a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from forge.core.enum_words import enum_word
from forge.runtime.tracing import Span, SpanRole, Value, start_span
from forge.v1 import common_pb2
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.sessions import Session
from services.gateway.turns.types import Piece, Turn

RunTurn = Callable[[Session, TurnRequest], AsyncGenerator[Piece | Turn]]


def with_span(
    run: RunTurn, session: Session, request: TurnRequest, *, model: str
) -> AsyncGenerator[Piece | Turn]:
    """Returns the events of `run`, with a span around it if the caller's request has one."""
    operation = "text_completion" if request.prompt_ids else "chat"
    span = start_span(
        f"{operation} {model}",
        kind=SpanRole.CLIENT,
        attributes=_asked(session, request, operation=operation, model=model),
    )
    if not span.traceparent:
        return run(session, request)
    return _within(span, run, session, replace(request, traceparent=span.traceparent))


async def _within(
    span: Span, run: RunTurn, session: Session, request: TurnRequest
) -> AsyncGenerator[Piece | Turn]:
    try:
        async with aclosing(run(session, request)) as events:
            async for event in events:
                if isinstance(event, Turn):
                    span.set(_answered(event))
                yield event
    except GeneratorExit:
        # The agent left: no fault.
        raise
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        span.end()


def _asked(
    session: Session, request: TurnRequest, *, operation: str, model: str
) -> dict[str, Value]:
    claims, sampling = session.claims, request.sampling
    asked: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "forge",
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": claims.trajectory_id,
        "gen_ai.request.stream": request.stream,
        "forge.task_id": claims.task_id,
        "forge.domain": claims.domain,
    }
    if sampling.max_tokens:
        asked["gen_ai.request.max_tokens"] = sampling.max_tokens
    if sampling.HasField("temperature"):
        asked["gen_ai.request.temperature"] = sampling.temperature
    return asked


def _answered(turn: Turn) -> dict[str, Value]:
    sampled = turn.sampled
    reason = enum_word(common_pb2.FinishReason, sampled.finish_reason)
    return {
        "gen_ai.usage.input_tokens": turn.prompt_tokens,
        "gen_ai.usage.output_tokens": sampled.tokens,
        "gen_ai.response.finish_reasons": (reason,),
        "forge.turn_index": turn.turn_index,
    }
