"""Runs one turn from request to record.

Owns the order of the steps: the session returns the prompt, a router samples, the answer is parsed
and streamed, the session records it. Tokens that the agent has seen are recorded even if the agent
leaves, the router dies or the session closes. Owns no protocol: the edges convert to `TurnRequest`
and from deltas and `Turn`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.security.tokens import Claims
from forge.runtime.tracing import is_tracing
from forge.v1 import common_pb2, inference_pb2
from services.gateway.actors.messages import EndCall, EndOther
from services.gateway.config import SamplingBounds
from services.gateway.conversation.prompt import Prompt, SampledAnswer
from services.gateway.conversation.turn_request import TurnRequest, choice_sampling
from services.gateway.errors import SessionClosed
from services.gateway.metrics import PREPARE_SECONDS
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.other_model import OtherModel
from services.gateway.router.router_stream import RouterStreams
from services.gateway.router.sample_call import SampleCall
from services.gateway.sessions import Session, Sessions
from services.gateway.structured_output.forced_opening import opening_of
from services.gateway.structured_output.turn_grammar import check, turn_grammar
from services.gateway.turns.answer_parser import AnswerParser, turn_parser
from services.gateway.turns.record import TurnRecord, record_end
from services.gateway.turns.sampling_policy import with_policy
from services.gateway.turns.turn_span import with_span
from services.gateway.turns.types import Piece, Turn

IMAGES_OMITTED = "X-Forge-Images-Omitted"
"""Response header: number of new images for which a text stands in the prompt."""
TURN_HEADER = "X-Forge-Turn"
"""Response header with the index of the turn, which rewards refer to."""
MODEL_HEADER = "X-Forge-Model"
"""Response header with the name of a model that is not the policy."""


class Turns:
    """Runs turns."""

    def __init__(  # noqa: PLR0913
        self,
        model: ChatModel,
        sessions: Sessions,
        streams: RouterStreams,
        *,
        sample_timeout_s: float,
        retry_for_s: float,
        bounds: SamplingBounds,
        record_experts: bool = False,
        other: OtherModel | None = None,
        record: TurnRecord | None = None,
    ) -> None:
        """`other` and `record`: of a model that is not the policy. `record_experts`: ask engines
        for the experts of each token."""
        self.model = model
        self.other = other
        self._record = record or TurnRecord()
        self._bounds = bounds
        self._record_experts = record_experts and other is None
        self._sessions = sessions
        self._streams = streams
        self._sample_timeout_s = sample_timeout_s
        self._retry_for_s = retry_for_s

    def run_turn(self, session: Session, request: TurnRequest) -> AsyncGenerator[Piece | Turn]:
        """Yields pieces as they are sampled, if the request is streamed, then the turn.

        Closing the generator aborts the turn. Raises `ContextTooLong`, `SessionClosed`,
        `ResourceExhausted`, `Unavailable`, `InvalidArgument`.
        """
        if not is_tracing():
            return self._run_turn(session, request)
        name = self.other.name if self.other is not None else self.model.name
        return with_span(self._run_turn, session, request, model=name)

    async def _run_turn(
        self, session: Session, request: TurnRequest
    ) -> AsyncGenerator[Piece | Turn]:
        request = self._with_template(session, request)
        await check(request)
        if self.other is None:
            request = with_policy(request, session.claims.sampling, self._bounds)
        opening = opening_of(self.model, request)
        with self._sessions.count_call(session):
            call = SampleCall(
                self._streams,
                timeout_s=self._sample_timeout_s,
                retry_for_s=self._retry_for_s,
                streamed=request.stream,
            )
            prompt: Prompt | None = None
            parser: AnswerParser | None = None
            ended = False

            def end_call(sampled: SampledAnswer | None) -> EndCall | EndOther:
                return self._record.end(
                    request, call_id=call.call_id, prompt=prompt, sampled=sampled
                )

            try:
                prompt = await self._begin(session, request, opening, call)
                parser = self._set_request(call, session, request, prompt, opening)
                while (piece := await _next_piece(call, parser, prompt)) is not None:
                    # An answer that is not streamed may still be sampled again.
                    if request.stream:
                        yield piece
                ended = True
                sampled = _sampled_answer(parser, request)
                turn_index = await record_end(session, end_call(sampled))
                if call.aborted or sampled is None:
                    raise SessionClosed("the session was closed during this call")
                _name_turn(request.headers, turn_index)
                yield _turn(parser, sampled, request, turn_index=turn_index, prompt=prompt)
            finally:
                call.cancel_attempt()
                if not ended:
                    session.actor.tell(end_call(_sampled_answer(parser, request)))

    async def finish_turn(self, session: Session, request: TurnRequest) -> Turn:
        """Returns the finished turn; raises the errors of `run_turn`."""
        async with aclosing(self.run_turn(session, request)) as events:
            async for event in events:
                if isinstance(event, Turn):
                    return event
        raise AssertionError("a run ends with its turn or with an error")

    async def count_prompt_tokens(self, session: Session, request: TurnRequest) -> int:
        """Counts the tokens of the prompt of `request`; records no turn."""
        return len(await self.prompt_ids(session, request)) // TOKEN_BYTES

    async def prompt_ids(self, session: Session, request: TurnRequest) -> bytes:
        """Returns the int32 ids of the prompt of `request`; records no turn. Raises the errors of
        `run_turn`."""
        request = self._with_template(session, request)
        with self._sessions.admit(session):
            prompt = await self._record.draft(
                session, request, opening=opening_of(self.model, request)
            )
        return prompt.ids

    def context_limit(self, claims: Claims) -> int:
        """Returns the longest context of a session, prompt and answer. The limit of a domain is
        one for the policy."""
        tokens = self.model.context_tokens
        return claims.context_limit(tokens) if self.other is None else tokens

    def _with_template(self, session: Session, request: TurnRequest) -> TurnRequest:
        """Returns the request with the template variables of its session too."""
        ours = session.claims.chat_template_kwargs if self.other is None else ""
        theirs = request.template_kwargs
        if request.prompt_ids or not (ours or theirs):
            return request
        return replace(request, template_kwargs=self.model.template_kwargs(ours, theirs))

    async def _begin(
        self, session: Session, request: TurnRequest, opening: str, call: SampleCall
    ) -> Prompt:
        started = time.perf_counter()
        prompt = await self._record.begin(
            session, request, opening=opening, call_id=call.call_id, abort=call.abort
        )
        PREPARE_SECONDS.observe(time.perf_counter() - started)
        return prompt

    def _set_request(
        self,
        call: SampleCall,
        session: Session,
        request: TurnRequest,
        prompt: Prompt,
        opening: str,
    ) -> AnswerParser:
        """Gives a call its request; returns the parser of its answer."""
        if self.other is not None:
            request.headers[MODEL_HEADER] = self.other.name
        if prompt.new_images:
            request.headers[IMAGES_OMITTED] = str(prompt.new_images)
        inside = self.model.starts_inside(prompt.ids, opening=opening)
        parser = turn_parser(self.model, request, opening=opening, inside=inside)
        grammar = turn_grammar(self.model, request, opening=opening, inside=inside)
        sample_request = self._sample_request(session, request, prompt, grammar, call)
        call.set_request(sample_request, on_retry=parser.restart)
        return parser

    def _sample_request(
        self,
        session: Session,
        request: TurnRequest,
        prompt: Prompt,
        grammar: common_pb2.Grammar | None,
        call: SampleCall,
    ) -> inference_pb2.SampleRequest:
        sampling = choice_sampling(request)
        room = self.context_limit(session.claims) - prompt.tokens
        sampling.max_tokens = min(sampling.max_tokens or room, room)
        sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
        sampling.stop_token_ids.extend(sorted(self.model.stop_ids - {*sampling.stop_token_ids}))
        sampling.ClearField("grammar")
        sampling.ClearField("routes_from")
        if self._record_experts:
            # The last token of an earlier turn was not computed there.
            sampling.routes_from = max(0, prompt.draft.shared.tokens - 1)
        if grammar is not None:
            sampling.grammar.CopyFrom(grammar)
        return inference_pb2.SampleRequest(
            request_id=call.call_id,
            session_id=session.claims.trajectory_id,
            prompt_ids=prompt.ids,
            sampling=sampling,
            stream=request.stream or bool(request.stop) or not request.parallel_calls,
            traceparent=request.traceparent,
        )


async def _next_piece(call: SampleCall, parser: AnswerParser, prompt: Prompt) -> Piece | None:
    """Returns None after the last piece."""
    response = None if parser.stopped else await call.read_response()
    if response is None:
        # At once: the router must not sample behind a stop string.
        call.cancel_attempt()
        return None
    before = parser.length
    deltas = parser.add_response(response)
    response.tokens.ClearField("routed_experts")  # for the record alone
    return Piece(
        deltas=deltas,
        tokens=response.tokens,
        ids=response.tokens.ids[: (parser.length - before) * TOKEN_BYTES],
        prompt_ids=prompt.ids,
        prompt_tokens=prompt.tokens,
        last=parser.complete,
    )


def _name_turn(headers: dict[str, str], turn_index: int) -> None:
    """Adds the turn of an answer to the header; of several choices in the order of their ends."""
    others = headers.get(TURN_HEADER)
    headers[TURN_HEADER] = str(turn_index) if others is None else f"{others},{turn_index}"


def _sampled_answer(parser: AnswerParser | None, request: TurnRequest) -> SampledAnswer | None:
    """Returns the answer for the record; None for a call that ended before its first token."""
    return parser.sampled_answer(parsed=not request.prompt_ids) if parser else None


def _turn(
    parser: AnswerParser,
    sampled: SampledAnswer,
    request: TurnRequest,
    *,
    turn_index: int,
    prompt: Prompt,
) -> Turn:
    return Turn(
        turn_index=turn_index,
        message=sampled.answer or parser.message(),
        prefill=request.prefill,
        prompt_ids=prompt.ids,
        sampled=sampled,
        prompt_tokens=prompt.tokens,
        stop_text=parser.stop_text,
        tokens=parser.tokens,
        token_logprobs=parser.token_logprobs,
    )
