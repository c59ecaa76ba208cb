"""GatewayService over gRPC: decodes requests, runs turns, encodes responses.

Owns no state. The server verifies the session token before a handler runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from forge.core.errors import InvalidArgument
from forge.core.formats import TextDelta
from forge.core.sampling_limits import effective_temperature
from forge.core.token_columns import TOKEN_BYTES, int32_array
from forge.runtime.rpc.server import current_claims
from forge.runtime.rpc.tokens import split
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, gateway_pb2_grpc
from forge.v1 import gateway_pb2 as pb
from services.gateway.close_session import close_session, facts_of
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.call_labels import (
    AGENT_HEADER,
    LABELS,
    NO_LABELS,
    TRAIN_HEADER,
    with_headers,
)
from services.gateway.conversation.chat_history import ChatHistory
from services.gateway.conversation.turn_request import SIZE_BYTES, TurnRequest
from services.gateway.errors import SessionClosed
from services.gateway.http.openai.completions.chat_schema import tools_of
from services.gateway.http.request_fields.request_body import checked_stops, top_logprobs_of
from services.gateway.model.chat_model import Tools
from services.gateway.model_table import ModelTable
from services.gateway.pool_client import Pool
from services.gateway.reward_rules import admitted_rewards
from services.gateway.sessions import Sessions
from services.gateway.tenants import Tenants
from services.gateway.turns.run import Turns
from services.gateway.turns.types import Piece, Turn

FULL_NAME = "forge.v1.GatewayService"
SCOPES = {
    "OpenSession": "session|grader",
    "Chat": "session",
    "Generate": "session",
    "Annotate": "session|grader",
    "CloseSession": "session|grader",
}
AUDITED = frozenset({"Annotate", "CloseSession"})
"""Rewards of graders: calls in the audit log; those of sessions are not."""


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Implements gateway.proto, which has the contract of each RPC."""

    def __init__(
        self,
        turns: Turns,
        sessions: Sessions,
        pool: Pool,
        tenants: Tenants,
        *,
        models: ModelTable,
    ) -> None:
        self._turns = turns
        self._models = models
        self._sessions = sessions
        self._pool = pool
        self._tenants = tenants

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Any
    ) -> pb.OpenSessionResponse:
        claims = current_claims()
        async with self._sessions.use_session(claims) as session:
            facts = await facts_of(session)
            model_s = self._sessions.model_s(session)
        return pb.OpenSessionResponse(
            trajectory_id=claims.trajectory_id,
            task_id=claims.task_id,
            domain=claims.domain,
            model=self._turns.model.name,
            context_tokens=claims.context_limit(self._turns.model.context_tokens),
            turns=facts.turns,
            model_s=model_s,
            unanswered=session.unanswered,
        )

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncIterator[pb.ChatResponse]:
        if request.sampling.top_logprobs:
            raise InvalidArgument(
                "sampling.top_logprobs: Chat returns text; Generate returns log-probs"
            )
        claims = self._claims_for(request, context)
        turns = self._models.turns_or_policy(claims, request.model)
        turn_request = TurnRequest(
            messages=ChatHistory(request.messages),
            tools=_tools(request.tools_json),
            sampling=_sampling(request.sampling),
            stop=checked_stops("stop", list(request.stop)),
            template_kwargs=request.chat_template_kwargs_json,
            context_action=request.context_action,
            stream=request.stream,
            arrived=Moment.now(),
        )
        async with self._run(turns, claims, turn_request, context) as events:
            async for event in events:
                if isinstance(event, Turn):
                    yield _last_chat_response(event, streamed=request.stream)
                    continue
                deltas = [delta.text for delta in event.deltas if isinstance(delta, TextDelta)]
                if deltas:
                    yield pb.ChatResponse(delta="".join(deltas))

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        claims = self._claims_for(request, context)
        turns = self._models.turns_or_policy(claims, request.model)
        turn_request = TurnRequest(
            prompt_ids=_prompt_ids(request.prompt_ids, turns.model.vocabulary_tokens),
            sampling=_sampling(request.sampling),
            context_action=request.context_action,
            stream=request.stream,
            arrived=Moment.now(),
        )
        async with self._run(turns, claims, turn_request, context) as events:
            async for event in events:
                if isinstance(event, Turn):
                    for response in _last_generate_responses(event, streamed=request.stream):
                        yield response
                    continue
                for tokens in split(event.tokens):
                    yield pb.GenerateResponse(tokens=tokens)

    async def Annotate(self, request: pb.AnnotateRequest, context: Any) -> pb.AnnotateResponse:
        claims = current_claims()
        rewards = admitted_rewards(claims, request.rewards)
        async with self._sessions.use_session(claims) as session:
            if (await facts_of(session)).closed:
                raise SessionClosed(f"session {session.claims.trajectory_id} is closed")
            await self._pool.annotate(claims, rewards)
        return pb.AnnotateResponse()

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        claims = current_claims()
        async with self._sessions.use_session(claims) as session:
            summary = await close_session(
                self._sessions,
                self._pool,
                session,
                claims,
                rewards=request.rewards,
                abandon_reason=request.abandon_reason,
                min_turns=request.min_turns,
                after_agent_s=request.after_agent_s,
            )
        return pb.CloseSessionResponse(turns=summary.turns, sampled_tokens=summary.sampled_tokens)

    def _claims_for(self, request: pb.ChatRequest | pb.GenerateRequest, context: Any) -> Claims:
        """Returns the claims of a request for a turn, and reads its size and its labels. Raises
        `RequestTooLarge`."""
        claims, size_bytes = current_claims(), request.ByteSize()
        self._tenants.check_size(claims.tenant, size_bytes)
        SIZE_BYTES.set(size_bytes)
        _read_labels(context)
        return claims

    @asynccontextmanager
    async def _run(
        self, turns: Turns, claims: Claims, request: TurnRequest, context: Any
    ) -> AsyncIterator[AsyncIterator[Piece | Turn]]:
        """Returns the events of a turn; after them, sends the changes of the request."""
        async with (
            self._sessions.use_session(claims) as session,
            aclosing(turns.run_turn(session, request)) as events,
        ):
            yield events
        _tell_changes(context, request)


def _prompt_ids(ids: bytes, vocabulary: int) -> bytes:
    if not ids or len(ids) % TOKEN_BYTES:
        raise InvalidArgument(f"prompt_ids has {len(ids)} bytes; it must be int32 ids")
    numbers = int32_array(ids)
    if min(numbers) < 0 or max(numbers) >= vocabulary:
        raise InvalidArgument(
            f"prompt_ids must be from 0 to {vocabulary - 1}; "
            f"they are from {min(numbers)} to {max(numbers)}"
        )
    return ids


def _last_chat_response(turn: Turn, *, streamed: bool) -> pb.ChatResponse:
    message = turn.message
    return pb.ChatResponse(
        delta="" if streamed else message.content,
        message=pb.ChatMessage(
            role=message.role,
            content=message.content,
            reasoning=message.reasoning,
            tool_calls=[
                pb.ToolCall(id=call.call_id, name=call.name, arguments_json=call.arguments)
                for call in message.tool_calls
            ],
        ),
        finish_reason=turn.sampled.finish_reason,
        prompt_tokens=turn.prompt_tokens,
        sampled_tokens=turn.sampled.tokens,
        cached_tokens=turn.sampled.cached_tokens,
        turn_index=turn.turn_index,
    )


def _last_generate_responses(turn: Turn, *, streamed: bool) -> Iterator[pb.GenerateResponse]:
    """Yields the end, with all tokens unless they were streamed; large ones in several messages."""
    parts = [] if streamed else list(split(turn.tokens()))
    for tokens in parts[:-1]:
        yield pb.GenerateResponse(tokens=tokens)
    yield pb.GenerateResponse(
        tokens=parts[-1] if parts else None,
        finish_reason=turn.sampled.finish_reason,
        turn_index=turn.turn_index,
    )


def _read_labels(context: Any) -> None:
    """Reads the labels of a call from its metadata, which have the names of HTTP's headers."""
    metadata = dict(context.invocation_metadata())
    names = (AGENT_HEADER, TRAIN_HEADER)
    given = {name: metadata[name.lower()] for name in names if name.lower() in metadata}
    LABELS.set(with_headers(NO_LABELS, given))


def _tell_changes(context: Any, request: TurnRequest) -> None:
    """Sends deviations from the request as trailing metadata, as HTTP does in headers."""
    changes = [(name.lower(), value) for name, value in request.headers.items()]
    if changes:
        context.set_trailing_metadata(tuple(changes))


def _tools(tools_json: str) -> Tools:
    if not tools_json:
        return ()
    try:
        return tools_of(msgspec.json.decode(tools_json, type=list[dict[str, Any]]))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(f"tools_json is not an array of tool definitions: {error}") from None


def _sampling(sampling: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """Checks the parameters; `max_tokens` 0 means the rest of the context."""
    if sampling.HasField("temperature"):
        if not 0 <= sampling.temperature <= 100:
            raise InvalidArgument(f"temperature {sampling.temperature} must be from 0 to 100")
        # The turn's record must have the temperature of its distribution.
        sampling.temperature = effective_temperature(sampling.temperature)
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidArgument(f"top_p {sampling.top_p} must be in (0, 1]")
    if sampling.max_tokens and sampling.min_tokens > sampling.max_tokens:
        raise InvalidArgument(
            f"min_tokens {sampling.min_tokens} must be at most max_tokens {sampling.max_tokens}"
        )
    top_logprobs_of(sampling.top_logprobs)
    return sampling
