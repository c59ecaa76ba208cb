"""One turn from request to record.

Owns the order of things: the session gives the prompt, the router samples, the answer is read and
streamed, the session records. Whatever happens in between (the agent leaves, the router dies, the
session is closed), what was sampled and seen is recorded. Protocols are the edges' business: they
make a `TurnRequest` and read deltas and the `Turn`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from forge.core.errors import Unavailable
from forge.core.formats import Delta, Parser, PlainParser
from forge.core.messages import Message
from forge.v1 import common_pb2, inference_pb2
from services.gateway.actors.session import BeginChat, BeginGenerate, CountChat, EndCall
from services.gateway.answer import AnswerReader, TokenLogprob
from services.gateway.constraints import check, turn_grammar
from services.gateway.conversation import Prompt, Sampled
from services.gateway.errors import SessionClosed
from services.gateway.handles import Handle
from services.gateway.metrics import PREPARE_SECONDS, UPSTREAM_RETRIES
from services.gateway.model import ChatModel, Tools
from services.gateway.sample_stream import SampleStreams
from services.gateway.sessions import Session, Sessions
from services.gateway.upstream import SampleCall

ASK_TIMEOUT_S = 60.0
"""Of a session; it may have to be read back from the pool first."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
"""Before a router is asked again; doubles with each attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One call of an agent, whatever protocol it came by."""

    messages: Sequence[Message] = ()
    prompt_ids: bytes = b""
    """Set instead of `messages` by agents that render for themselves."""
    tools: Tools = ()
    call_tools: bool = True
    """Whether the answer is read for tool calls; else they are text."""
    parallel_calls: bool = True
    """Whether an answer may have several tool calls; else it ends with the first."""
    required_tool: str | None = None
    """The tool the answer must call; "" for any; None leaves it to the model."""
    sampling: common_pb2.SamplingParams
    """A `grammar` is the form of the answer, wherever the model reasons or calls tools instead."""
    stop: Sequence[str] = ()
    context_action: str = ""
    handle: Handle | None = None
    """A name for the turn, if it ends well."""
    stream: bool = False
    """Whether the caller passes deltas on as they come: then there is no second attempt."""
    arrived_s: float
    """Monotonic."""
    arrived_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A finished turn."""

    turn_index: int
    message: Message
    sampled: Sampled
    prompt_tokens: int
    stop_text: str
    """The stop string that ended it; "" if none did."""
    tokens: Callable[[], common_pb2.SampledTokens]
    """All that was sampled, in every column that was asked for."""
    token_logprobs: Callable[[], list[TokenLogprob]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one response of the router added."""

    deltas: Sequence[Delta]
    tokens: common_pb2.SampledTokens
    prompt_tokens: int
    last: bool = False
    """Whether the turn comes next."""


class Turns:
    """Runs turns."""

    def __init__(
        self,
        model: ChatModel,
        sessions: Sessions,
        streams: SampleStreams,
        *,
        sample_timeout_s: float,
        retry_for_s: float,
    ) -> None:
        self.model = model
        self._sessions = sessions
        self._streams = streams
        self._sample_timeout_s = sample_timeout_s
        self._retry_for_s = retry_for_s

    async def run(self, session: Session, request: TurnRequest) -> AsyncGenerator[Piece | Turn]:
        """Yields pieces as they are sampled, if the request is streamed, then the turn.

        Close it to abort. Raises `ContextTooLong`, `SessionClosed`, `ResourceExhausted`,
        `Unavailable`, `InvalidArgument`.
        """
        await check(request)
        with self._sessions.call(session):
            call = SampleCall(self._streams, timeout_s=self._sample_timeout_s)
            opening = self._opening(request)
            attempt = _Attempt(self.model, request, opening)
            prompt: Prompt | None = None
            ended = False
            try:
                prompt = await self._begin(session, request, opening, call)
                attempt.begin(prompt)
                samples = _Samples(
                    call,
                    attempt,
                    self._sample_request(session, request, prompt, attempt, call),
                    prompt_tokens=prompt.tokens,
                    retry_for_s=self._retry_for_s,
                )
                while (piece := await samples.next()) is not None:
                    # The answer may still be begun anew, unless its pieces are passed on.
                    if request.stream:
                        yield piece
                ended = True
                sampled = attempt.remains()
                turn_index = await self._end(session, self._ending(call, request, prompt, sampled))
                if call.aborted or sampled is None:
                    raise SessionClosed("the session was closed while this call was answered")
                yield attempt.turn(sampled, turn_index=turn_index, prompt_tokens=prompt.tokens)
            finally:
                call.end()
                if not ended:
                    session.actor.tell(self._ending(call, request, prompt, attempt.remains()))

    async def whole(self, session: Session, request: TurnRequest) -> Turn:
        """The turn when it is finished; raises as `run` does."""
        async with aclosing(self.run(session, request)) as events:
            async for event in events:
                if isinstance(event, Turn):
                    return event
        raise AssertionError("a run ends with its turn or with an error")

    async def count(self, session: Session, request: TurnRequest) -> int:
        """Tokens of the prompt that `request` would be sampled from; nothing is recorded."""
        count = CountChat(
            messages=request.messages, tools=request.tools, opening=self._opening(request)
        )
        tokens: int = await session.actor.ask(count, timeout_s=ASK_TIMEOUT_S)
        return tokens

    async def _begin(
        self, session: Session, request: TurnRequest, opening: str, call: SampleCall
    ) -> Prompt:
        started = time.perf_counter()
        begin = (
            BeginGenerate(call_id=call.call_id, abort=call.abort, prompt_ids=request.prompt_ids)
            if request.prompt_ids
            else BeginChat(
                call_id=call.call_id,
                abort=call.abort,
                messages=request.messages,
                tools=request.tools,
                opening=opening,
            )
        )
        prompt: Prompt = await session.actor.ask(begin, timeout_s=ASK_TIMEOUT_S)
        PREPARE_SECONDS.observe(time.perf_counter() - started)
        return prompt

    def _sample_request(
        self,
        session: Session,
        request: TurnRequest,
        prompt: Prompt,
        attempt: _Attempt,
        call: SampleCall,
    ) -> inference_pb2.SampleRequest:
        return inference_pb2.SampleRequest(
            request_id=call.call_id,
            session_id=session.claims.trajectory_id,
            prompt_ids=prompt.ids,
            sampling=self._sampling(session, request, prompt, attempt),
            stream=request.stream or bool(request.stop) or not request.parallel_calls,
        )

    def _sampling(
        self, session: Session, request: TurnRequest, prompt: Prompt, attempt: _Attempt
    ) -> common_pb2.SamplingParams:
        """What was asked for, within the room that the context leaves and as this model writes."""
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        room = session.claims.context_limit(self.model.context_tokens) - prompt.tokens
        sampling.max_tokens = min(sampling.max_tokens or room, room)
        sampling.stop_token_ids.extend(sorted(self.model.stop_ids - {*sampling.stop_token_ids}))
        grammar = turn_grammar(self.model, request, opening=attempt.opening, inside=attempt.inside)
        sampling.ClearField("grammar")
        if grammar is not None:
            sampling.grammar.CopyFrom(grammar)
        return sampling

    def _opening(self, request: TurnRequest) -> str:
        if request.required_tool is None:
            return ""
        opening = self.model.format.opening(request.required_tool or None)
        reasoning = self.model.reasoning
        # Where the template opens the reasoning, that has to end first.
        return reasoning.closing + opening if reasoning and self.model.opens_reasoning else opening

    async def _end(self, session: Session, end: EndCall) -> int:
        # Shielded: an agent that leaves at this very moment must not take the turn with it.
        ending = asyncio.ensure_future(session.actor.ask(end, timeout_s=ASK_TIMEOUT_S))
        turn_index: int = await asyncio.shield(ending)
        return turn_index

    def _ending(
        self,
        call: SampleCall,
        request: TurnRequest,
        prompt: Prompt | None,
        sampled: Sampled | None,
    ) -> EndCall:
        sampling = request.sampling
        ended_well = sampled and sampled.finish_reason != common_pb2.FINISH_REASON_ABORTED
        return EndCall(
            call_id=call.call_id,
            prompt=prompt,
            sampled=sampled,
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            context_action=request.context_action,
            started_s=request.arrived_s,
            started_unix_s=request.arrived_unix_s,
            handle=request.handle if ended_well else None,
        )


class _Samples:
    """The pieces of one turn; it is begun anew while nothing of it was passed on."""

    def __init__(
        self,
        call: SampleCall,
        attempt: _Attempt,
        request: inference_pb2.SampleRequest,
        *,
        prompt_tokens: int,
        retry_for_s: float,
    ) -> None:
        self._call = call
        self._attempt = attempt
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._give_up_s = time.monotonic() + retry_for_s
        self._backoff_s = FIRST_BACKOFF_S
        self._begun = False

    async def next(self) -> Piece | None:
        """None when there is a whole answer, or the call was aborted. Raises what the router
        answered, unless another may still be asked."""
        attempt = self._attempt
        while not attempt.reader.stopped:
            try:
                response = await self._response()
                if response is not None:
                    return attempt.take(response, self._prompt_tokens)
                if attempt.complete or self._call.aborted:
                    return None
                raise Unavailable("the router ended the answer without a finish reason")
            except Unavailable:
                if attempt.complete:
                    return None
                if attempt.passed_on or time.monotonic() + self._backoff_s >= self._give_up_s:
                    raise
            await self._begin_anew()
        self._call.end()  # at once: nobody wants what the router samples from here on
        return None

    async def _response(self) -> inference_pb2.SampleResponse | None:
        if not self._begun:
            self._begun = True
            wait_s = max(0.1, self._give_up_s - time.monotonic())
            await self._call.begin(self._request, wait_s=wait_s)
        return await self._call.read()

    async def _begin_anew(self) -> None:
        UPSTREAM_RETRIES.inc()
        self._call.end()
        self._begun = False
        self._attempt.restart()
        # Another id, so that what is left of the first attempt cannot be mistaken for this.
        self._request.request_id = f"{self._call.call_id}-{uuid.uuid4().hex[:8]}"
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)


class _Attempt:
    """What has been sampled for one turn so far."""

    def __init__(self, model: ChatModel, request: TurnRequest, opening: str) -> None:
        self._model = model
        self._request = request
        self.opening = opening
        self.inside = False
        """Whether the answer begins with reasoning that nothing marks."""
        self.passed_on = False
        """Whether the agent has seen any of it."""
        self.restart()

    def begin(self, prompt: Prompt) -> None:
        """What is sampled from here on answers this prompt."""
        self.inside = self._model.starts_inside(prompt.ids, opening=self.opening)
        if self.inside:
            self.restart()

    def restart(self) -> None:
        self.reader = AnswerReader(
            self._model,
            _parser(self._model, self._request, inside=self.inside),
            # Some chat templates refuse ids of any other length.
            new_call_id=lambda: secrets.token_hex(5)[:9],
            opening=self.opening,
            stop=self._request.stop,
            parallel_calls=self._request.parallel_calls,
        )
        self.complete = False
        self._last = inference_pb2.SampleResponse()

    def take(self, response: inference_pb2.SampleResponse, prompt_tokens: int) -> Piece:
        deltas = self.reader.feed(response.tokens)
        self.complete = bool(response.finish_reason) or self.reader.stopped
        if self.complete:
            self._last = response
            deltas += self.reader.finish()
        self.passed_on = self.passed_on or self._request.stream
        return Piece(
            deltas=deltas,
            tokens=response.tokens,
            prompt_tokens=prompt_tokens,
            last=self.complete,
        )

    def sampled(self) -> Sampled:
        """What the session records; an answer that is not complete was aborted."""
        reader, last = self.reader, self._last
        if not self.complete:
            finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_ABORTED
        elif reader.stopped:
            finish_reason = common_pb2.FINISH_REASON_STOP
        else:
            finish_reason = last.finish_reason
        return Sampled(
            ids=bytes(reader.ids),
            logprobs=bytes(reader.logprobs),
            weight_versions=bytes(reader.weight_versions),
            allowed_logprobs=bytes(reader.allowed_logprobs),
            finish_reason=finish_reason,
            answer=None if self._request.prompt_ids else reader.message(),
            parse_error=reader.parse_error if self.complete else "",
            queue_s=last.timings.queue_s,
            prefill_s=last.timings.prefill_s,
            decode_s=last.timings.decode_s,
            cached_tokens=last.cached_tokens,
        )

    def turn(self, sampled: Sampled, *, turn_index: int, prompt_tokens: int) -> Turn:
        return Turn(
            turn_index=turn_index,
            message=sampled.answer or self.reader.message(),
            sampled=sampled,
            prompt_tokens=prompt_tokens,
            stop_text=self.reader.stop_text,
            tokens=self.reader.tokens,
            token_logprobs=self.reader.token_logprobs,
        )

    def remains(self) -> Sampled | None:
        """What is left of a call, however it ended; None if it was cut off before its first token."""
        return self.sampled() if self.complete or self.reader.ids else None


def _parser(model: ChatModel, request: TurnRequest, *, inside: bool) -> Parser:
    if request.prompt_ids:
        return PlainParser()
    reads_calls = bool(request.tools) and request.call_tools
    inner = model.format.parser(request.tools) if reads_calls else PlainParser()
    return model.reasoning.parser(inner, inside=inside) if model.reasoning else inner
