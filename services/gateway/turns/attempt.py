"""The answer of one turn, had from routers that may fail.

Owns what has been sampled so far, and when it is begun anew: while nothing of it was passed on.
Owns no session and no record.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid

from forge.core.errors import Unavailable
from forge.core.formats import Parser, PlainParser
from forge.v1 import common_pb2, inference_pb2
from services.gateway.conversation.conversation import Prompt, Sampled
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.errors import RouterLost
from services.gateway.metrics import UPSTREAM_RETRIES
from services.gateway.model.chat_model import ChatModel
from services.gateway.router.sample_call import SampleCall
from services.gateway.turns.answer_parser import AnswerReader
from services.gateway.turns.types import Piece, Turn

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
"""Before a router is asked again; doubles with each attempt."""
LASTED_S = 10.0
"""An attempt that was lost after so long had a router. What is waited for another begins then."""


class Samples:
    """The pieces of one turn; it is begun anew while nothing of it was passed on."""

    def __init__(
        self,
        call: SampleCall,
        attempt: Attempt,
        request: inference_pb2.SampleRequest,
        *,
        prompt_tokens: int,
        retry_for_s: float,
    ) -> None:
        self._call = call
        self._attempt = attempt
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._retry_for_s = retry_for_s
        self._give_up_s = time.monotonic() + retry_for_s
        self._backoff_s = FIRST_BACKOFF_S
        self._begun_s: float | None = None

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
            except Unavailable as error:
                if attempt.complete:
                    return None
                if isinstance(error, RouterLost) and self._has_lasted():
                    self._give_up_s = time.monotonic() + self._retry_for_s
                    self._backoff_s = FIRST_BACKOFF_S
                if attempt.passed_on or time.monotonic() + self._backoff_s >= self._give_up_s:
                    raise
            await self._begin_anew()
        self._call.end()  # at once: nobody wants what the router samples from here on
        return None

    async def _response(self) -> inference_pb2.SampleResponse | None:
        if self._begun_s is None:
            self._begun_s = time.monotonic()
            wait_s = max(0.1, self._give_up_s - self._begun_s)
            await self._call.begin(self._request, wait_s=wait_s)
        return await self._call.read()

    def _has_lasted(self) -> bool:
        """Whether there was a router: to find that there is none takes less."""
        return self._begun_s is not None and time.monotonic() - self._begun_s >= LASTED_S

    async def _begin_anew(self) -> None:
        UPSTREAM_RETRIES.inc()
        self._call.end()
        self._begun_s = None
        self._attempt.restart()
        # Another id, so that what is left of the first attempt cannot be mistaken for this.
        self._request.request_id = f"{self._call.call_id}-{uuid.uuid4().hex[:8]}"
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)


class Attempt:
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
        """What is left of a call, however it ended; None of one cut off before its first token."""
        return self.sampled() if self.complete or self.reader.ids else None


def _parser(model: ChatModel, request: TurnRequest, *, inside: bool) -> Parser:
    if request.prompt_ids:
        return PlainParser()
    reads_calls = bool(request.tools) and request.call_tools
    inner = model.format.parser(request.tools) if reads_calls else PlainParser()
    return model.reasoning.parser(inner, inside=inside) if model.reasoning else inner
