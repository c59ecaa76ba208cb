"""Parses the sampled tokens of one answer: text, stop strings, reasoning, tool calls.

Owns the tokens of the answer so far. Tokens after a stop string, or after the only allowed tool
call, are dropped: no context ever contains them. Owns no I/O.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from math import isfinite
from typing import NamedTuple

from forge.core.conversation.messages import Message, ToolCall
from forge.core.errors import DataLoss
from forge.core.formats import (
    CallDelta,
    Delta,
    Parser,
    PlainParser,
    ReasoningDelta,
    TextDelta,
    reads_channels,
)
from forge.core.formats.parsers.tags import first_tag, held_back
from forge.core.token_columns import TOKEN_BYTES, float32_array, int32_array
from forge.runtime.rpc.routes import joined_routes
from forge.v1 import common_pb2, inference_pb2
from services.gateway.conversation.prompt import SampledAnswer
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.chat_model import ChatModel, TextStream

_COLUMNS = ("ids", "logprobs", "weight_versions", "allowed_logprobs")
"""Columns of `SampledTokens` with one number per token; the last one may be empty."""
_TOP_COLUMNS = ("top_ids", "top_logprobs")
"""Columns with the likeliest tokens, the same number per position; empty unless requested."""


class LikelyToken(NamedTuple):
    """A token and its log-prob at a position."""

    token_id: int
    text: str
    """U+FFFD for a part of a character."""
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token, for clients that request log-probs."""

    sampled: LikelyToken
    top: Sequence[LikelyToken] = ()
    """The likeliest tokens at its position, likeliest first, if requested."""


class AnswerParser:
    """Parses one answer."""

    def __init__(
        self,
        model: ChatModel,
        new_parser: Callable[[], Parser],
        *,
        new_call_id: Callable[[], str],
        opening: str = "",
        prefill: str = "",
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        parallel_calls: bool = True,
    ) -> None:
        """`prefill`: the end of `opening` that the agent has sent itself; its deltas are not
        returned. `min_tokens`: a stop string before that many tokens is text."""
        self._model = model
        self._new_parser = new_parser
        self._new_call_id = new_call_id
        self._opening = opening
        self._prefill = prefill
        self._min_tokens = min_tokens
        self._stop = tuple(text for text in stop if text)
        self._parallel_calls = parallel_calls
        self.restart()

    def restart(self) -> None:
        """Drops the answer so far, before it is sampled again."""
        self.stopped = False
        """True after a stop string or the only allowed call: later tokens are dropped."""
        self.stop_text = ""
        """The stop string that ended the answer."""
        self.complete = False
        """True once the answer has a finish reason or is stopped."""
        self._columns = {name: bytearray() for name in (*_COLUMNS, *_TOP_COLUMNS)}
        self._routed: list[common_pb2.RoutedExperts] = []
        self._last = inference_pb2.SampleResponse()
        self._engine = ""
        """Engine of the newest response that names one: a cut answer has no last response."""
        self._parser = self._new_parser()
        self._stream = TextStream(self._model)
        self._stop_prefix = ""
        """Text that may be the beginning of a stop string."""
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._hidden = len(self._prefill)
        """Characters of the content that are not returned, because the agent has them."""
        if self._opening:
            self._new_text(self._add_deltas(self._parser.feed(self._opening)))

    def add_response(self, response: inference_pb2.SampleResponse) -> list[Delta]:
        """Adds a router's response; returns the new deltas."""
        deltas = self.feed(response.tokens)
        if response.tokens.routed_experts.ids:
            routed = common_pb2.RoutedExperts()
            routed.CopyFrom(response.tokens.routed_experts)
            self._routed.append(routed)
        self._engine = response.engine or self._engine
        self.complete = bool(response.finish_reason) or self.stopped
        if self.complete:
            self._last = response
            deltas += self.finish()
        return self._new_text(deltas)

    def _new_text(self, deltas: list[Delta]) -> list[Delta]:
        """Returns the deltas without the prefill, which the parser may hold back in part."""
        new: list[Delta] = []
        for delta in deltas:
            if self._hidden and isinstance(delta, TextDelta):
                shown = delta.text[self._hidden :]
                self._hidden -= len(delta.text) - len(shown)
                delta = TextDelta(text=shown)
                if not shown:
                    continue
            new.append(delta)
        return new

    def feed(self, tokens: common_pb2.SampledTokens) -> list[Delta]:
        """Adds tokens; returns the deltas that later tokens cannot change."""
        count = len(tokens.ids) // TOKEN_BYTES
        top_bytes = len(tokens.top_ids) // count if count else 0
        if not (
            len(tokens.ids) == len(tokens.logprobs) == len(tokens.weight_versions)
            and len(tokens.allowed_logprobs) in (0, len(tokens.ids))
            and len(tokens.top_ids) == len(tokens.top_logprobs) == top_bytes * count
        ):
            raise DataLoss("the router sent token columns of unequal length")
        ids = list(int32_array(tokens.ids))
        deltas: list[Delta] = []
        if not self._stop and self._parallel_calls:
            deltas = self._add_deltas(self._parser.feed(self._stream.feed(ids)))
        else:
            for position, token_id in enumerate(ids):
                text = self._stream.feed((token_id,))
                if self.length + position >= self._min_tokens:
                    text = self._until_stop(text)
                deltas += self._add_deltas(self._parser.feed(text))
                if self.stopped:
                    count = position + 1
                    break
        for names, size in ((_COLUMNS, TOKEN_BYTES), (_TOP_COLUMNS, top_bytes)):
            for name in names:
                self._columns[name] += getattr(tokens, name)[: count * size]
        return deltas

    def finish(self) -> list[Delta]:
        """Returns the text that was held back, after the last token."""
        text = "" if self.stopped else self._until_stop(self._stream.finish()) + self._stop_prefix
        return self._add_deltas([*self._parser.feed(text), *self._parser.finish()])

    @property
    def parse_error(self) -> str:
        """Reason why a tool call did not parse; "" if all did."""
        return self._parser.error

    def message(self) -> Message:
        """Returns the answer so far, parsed."""
        return Message(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return len(self._columns["ids"]) // TOKEN_BYTES

    def tokens(self) -> common_pb2.SampledTokens:
        """Returns the tokens so far, with every requested column."""
        return self._tokens(*self._columns)

    def _tokens(self, *names: str) -> common_pb2.SampledTokens:
        tokens = common_pb2.SampledTokens()
        for name in names:
            setattr(tokens, name, bytes(self._columns[name]))
        return tokens

    def sampled_answer(self, *, parsed: bool) -> SampledAnswer | None:
        """Returns the answer as the session records it; aborted, unless it is complete. None
        before its first token."""
        if not (self.complete or self._columns["ids"]):
            return None
        if not self.complete:
            finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_ABORTED
        elif self.stopped:
            finish_reason = common_pb2.FINISH_REASON_STOP
        else:
            finish_reason = self._last.finish_reason
        return SampledAnswer(
            columns=self._tokens(*_COLUMNS),
            routed_experts=joined_routes(self._routed),
            finish_reason=finish_reason,
            answer=self.message() if parsed else None,
            parse_error=self.parse_error if self.complete else "",
            timings=self._last.timings,
            cached_tokens=self._last.cached_tokens,
            engine=self._engine,
        )

    def token_logprobs(self) -> list[TokenLogprob]:
        """Returns the log-prob and text of each token."""
        ids = int32_array(bytes(self._columns["ids"]))
        logprobs = float32_array(bytes(self._columns["logprobs"]))
        return [
            TokenLogprob(sampled=self._likely(token_id, logprob), top=top)
            for token_id, logprob, top in zip(ids, logprobs, self._top(len(ids)), strict=True)
        ]

    def _likely(self, token_id: int, logprob: float) -> LikelyToken:
        model = self._model
        return LikelyToken(token_id, model.piece(token_id), model.piece_bytes(token_id), logprob)

    def _top(self, count: int) -> Iterator[Sequence[LikelyToken]]:
        """Yields the likeliest tokens per position, without those of probability 0."""
        ids = int32_array(bytes(self._columns["top_ids"]))
        logprobs = float32_array(bytes(self._columns["top_logprobs"]))
        width = len(ids) // count if count else 0
        for start in range(0, count * width, width) if width else ():
            pairs = zip(ids[start : start + width], logprobs[start : start + width], strict=True)
            yield [self._likely(i, logprob) for i, logprob in pairs if isfinite(logprob)]
        if not width:
            yield from repeat((), count)

    def _until_stop(self, text: str) -> str:
        """Returns the text before the first stop string, without a possible beginning of one."""
        if self.stopped:
            return ""
        text = self._stop_prefix + text
        self._stop_prefix = ""
        match = first_tag(text, self._stop)
        if match is not None:
            self.stopped = True
            self.stop_text = match[1]
            return text[: match[0]]
        keep = held_back(text, self._stop)
        if keep:
            self._stop_prefix = text[-keep:]
        return text[: len(text) - keep]

    def _add_deltas(self, deltas: list[Delta]) -> list[Delta]:
        """Adds deltas to the answer; returns them with the ids of their calls."""
        named: list[Delta] = []
        for delta in deltas:
            if self._calls and not self._parallel_calls:
                # Formats that write calls as one list return several at once.
                break
            if isinstance(delta, CallDelta):
                delta = replace(delta, call_id=self._call_id(delta.call_id))
                self.stopped = self.stopped or not self._parallel_calls
            named.append(delta)
            match delta:
                case TextDelta(text=text):
                    self._content.append(text)
                case ReasoningDelta(text=text):
                    self._reasoning.append(text)
                case CallDelta(name=name, arguments=arguments, call_id=call_id):
                    self._calls.append(ToolCall(name=name, arguments=arguments, call_id=call_id))
        return named

    def _call_id(self, models_id: str) -> str:
        """Returns the model's own id, which its template shows again, unless it is a duplicate."""
        used = {call.call_id for call in self._calls}
        return models_id if models_id and models_id not in used else self._new_call_id()


def turn_parser(
    model: ChatModel, request: TurnRequest, *, opening: str, inside: bool
) -> AnswerParser:
    """Returns the parser of a turn's answer.

    `inside`: the answer begins with reasoning that no tag opens.
    """
    return AnswerParser(
        model,
        partial(_format_parser, model, request, inside=inside),
        # Some chat templates refuse ids of another length.
        new_call_id=lambda: secrets.token_hex(5)[:9],
        opening=opening,
        prefill=request.prefill,
        stop=request.stop,
        min_tokens=request.sampling.min_tokens,
        parallel_calls=request.parallel_calls,
    )


def _format_parser(model: ChatModel, request: TurnRequest, *, inside: bool) -> Parser:
    if request.prompt_ids:
        return PlainParser()
    parses_calls = bool(request.tools) and request.call_tools
    if reads_channels(model.format):
        return model.format.parser(request.tools if parses_calls else ())
    inner = model.format.parser(request.tools) if parses_calls else PlainParser()
    return model.reasoning.parser(inner, inside=inside) if model.reasoning else inner
