"""From sampled tokens to an answer: text, stop strings, reasoning, tool calls.

Owns what one call has sampled so far. Tokens behind the one that completes a stop string, or the
only tool call that is wanted, are dropped: no context ever contains them. Owns no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import isfinite

from forge.core.conversation.messages import Message, ToolCall
from forge.core.errors import DataLoss
from forge.core.formats import CallDelta, Delta, Parser, ReasoningDelta, TextDelta
from forge.core.formats.tags import first_tag, held_back
from forge.core.token_columns import TOKEN_BYTES, float32_array, int32_array
from forge.v1 import common_pb2
from services.gateway.model.chat_model import ChatModel, TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token, for clients that asked for log-probs."""

    text: str
    logprob: float
    top: Sequence[tuple[str, float]] = ()
    """The likeliest tokens at its place and their log-probs, if asked for; the likeliest first."""


class AnswerReader:
    """Reads one answer from the tokens of one call."""

    def __init__(
        self,
        model: ChatModel,
        parser: Parser,
        *,
        new_call_id: Callable[[], str],
        opening: str = "",
        stop: Sequence[str] = (),
        parallel_calls: bool = True,
    ) -> None:
        self.stopped = False
        """Whether a stop string or the only call was completed: nothing more is wanted."""
        self.stop_text = ""
        """The stop string that was completed."""
        self.ids = bytearray()
        self.logprobs = bytearray()
        self.weight_versions = bytearray()
        self.allowed_logprobs = bytearray()
        """Empty without a grammar or a cut."""
        self._top_ids = bytearray()
        self._top_logprobs = bytearray()
        """Of the likeliest tokens, the same number for each; empty unless asked for."""
        self._model = model
        self._parser = parser
        self._stream = TextStream(model)
        self._stop = tuple(text for text in stop if text)
        self._parallel_calls = parallel_calls
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._new_call_id = new_call_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        if opening:
            self._take(parser.feed(opening))

    def feed(self, tokens: common_pb2.SampledTokens) -> list[Delta]:
        """Takes more tokens and gives the text that is certain by now."""
        count = len(tokens.ids) // TOKEN_BYTES
        if not len(tokens.ids) == len(tokens.logprobs) == len(tokens.weight_versions):
            raise DataLoss("the engine sent columns of unequal length")
        if len(tokens.allowed_logprobs) not in (0, len(tokens.ids)):
            raise DataLoss("the engine sent columns of unequal length")
        top_bytes = len(tokens.top_ids) // count if count else 0
        if not len(tokens.top_ids) == len(tokens.top_logprobs) == top_bytes * count:
            raise DataLoss("the engine sent columns of unequal length")
        ids = list(int32_array(tokens.ids))
        deltas: list[Delta] = []
        if not self._stop and self._parallel_calls:
            deltas = self._take(self._parser.feed(self._stream.feed(ids)))
        else:
            for position, token_id in enumerate(ids):
                text = self._until_stop(self._stream.feed((token_id,)))
                deltas += self._take(self._parser.feed(text))
                if self.stopped:
                    count = position + 1
                    break
        self.ids += tokens.ids[: count * TOKEN_BYTES]
        self.logprobs += tokens.logprobs[: count * TOKEN_BYTES]
        self.weight_versions += tokens.weight_versions[: count * TOKEN_BYTES]
        self.allowed_logprobs += tokens.allowed_logprobs[: count * TOKEN_BYTES]
        self._top_ids += tokens.top_ids[: count * top_bytes]
        self._top_logprobs += tokens.top_logprobs[: count * top_bytes]
        return deltas

    def finish(self) -> list[Delta]:
        """The last token has come: gives what was held back."""
        text = "" if self.stopped else self._until_stop(self._stream.finish()) + self._held
        return self._take([*self._parser.feed(text), *self._parser.finish()])

    @property
    def parse_error(self) -> str:
        return self._parser.error

    def message(self) -> Message:
        """The answer so far, parsed."""
        return Message(
            role="assistant",
            content="".join(self._content),
            reasoning="".join(self._reasoning),
            tool_calls=tuple(self._calls),
        )

    def tokens(self) -> common_pb2.SampledTokens:
        """All of the answer so far."""
        return common_pb2.SampledTokens(
            ids=bytes(self.ids),
            logprobs=bytes(self.logprobs),
            weight_versions=bytes(self.weight_versions),
            allowed_logprobs=bytes(self.allowed_logprobs),
            top_ids=bytes(self._top_ids),
            top_logprobs=bytes(self._top_logprobs),
        )

    def token_logprobs(self) -> list[TokenLogprob]:
        ids, logprobs = int32_array(bytes(self.ids)), float32_array(bytes(self.logprobs))
        return [
            TokenLogprob(text=self._model.piece(token_id), logprob=logprob, top=top)
            for token_id, logprob, top in zip(ids, logprobs, self._top(len(ids)), strict=True)
        ]

    def _top(self, count: int) -> Iterator[Sequence[tuple[str, float]]]:
        """What was likeliest at each place; what had no probability is left out."""
        ids = int32_array(bytes(self._top_ids))
        logprobs = float32_array(bytes(self._top_logprobs))
        each = len(ids) // count if count else 0
        for start in range(0, count * each, each) if each else ():
            pairs = zip(ids[start : start + each], logprobs[start : start + each], strict=True)
            yield [(self._model.piece(i), logprob) for i, logprob in pairs if isfinite(logprob)]
        if not each:
            yield from repeat((), count)

    def _until_stop(self, text: str) -> str:
        """Text up to the first stop string, less what may become one."""
        if self.stopped:
            return ""
        text = self._held + text
        self._held = ""
        found = first_tag(text, self._stop)
        if found is not None:
            self.stopped = True
            self.stop_text = found[1]
            return text[: found[0]]
        keep = held_back(text, self._stop)
        if keep:
            self._held = text[-keep:]
        return text[: len(text) - keep]

    def _take(self, deltas: list[Delta]) -> list[Delta]:
        """Adds deltas to the answer, and gives its calls their ids."""
        named: list[Delta] = []
        for delta in deltas:
            if self._calls and not self._parallel_calls:
                # Formats that write calls as one list give several at once.
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

    def _call_id(self, own: str) -> str:
        """The model's own id where it gives one, for it sees that again; but no id twice."""
        taken = {call.call_id for call in self._calls}
        return own if own and own not in taken else self._new_call_id()
