"""Result of a call of an external API: texts for the record, usage, and regular end.

Reads the answer as it passes, complete or as server-sent events of OpenAI's, Anthropic's and
Gemini's protocols. Its memory is bounded by what the record keeps.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from forge.v1 import common_pb2

MAX_LINE_BYTES = 1 << 20
"""A longer line is not searched for usage."""
MAX_TOKENS = 2**32 - 1
_LAST_EVENT = re.compile(
    rb"^(data: ?\[DONE\]|event: ?(?:message_stop|error|response\.(?:completed|incomplete|failed)))",
    re.MULTILINE,
)
_LONGEST_MARK = 32
_GEMINI_ENDS = (b'"finishReason"', b'"blockReason"')


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    """The usage in Gemini's API."""

    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None
    message: _Inner | None = None
    """Message of the first event of Anthropic's stream."""
    response: _Inner | None = None
    """Response in the last event of a Responses stream."""
    metadata: _Metadata | None = msgspec.field(default=None, name="usageMetadata")


class ExternalAnswer:
    """The answer of one call, as it comes."""

    def __init__(self, *, streamed: bool, recorded_bytes: int, gemini: bool = False) -> None:
        self.prompt_tokens = self.sampled_tokens = 0
        self.ended = False
        """Whether the last event of a stream has come."""
        self._streamed = streamed
        self._gemini = gemini
        self._recorded_bytes = recorded_bytes
        self._text = bytearray()
        self._received = 0
        self._line = bytearray()
        """The unfinished line of a stream."""
        self._tail = b"\n"

    def add(self, piece: bytes) -> int | None:
        """Adds a piece; returns the place in it where the last event begins, if it does."""
        self._received += len(piece)
        self._text += piece[: max(0, self._recorded_bytes - len(self._text))]
        if not self._streamed:
            return None
        *lines, rest = piece.split(b"\n")
        for line in lines:
            self._read(bytes(self._line) + line if len(self._line) <= MAX_LINE_BYTES else b"")
            self._line.clear()
        self._line += rest[: MAX_LINE_BYTES + 1 - len(self._line)]
        # Gemini's last event is recognized by its content, and its clients read no comments.
        return None if self._gemini else self._last_event(piece)

    def read_usage(self, content: bytes) -> None:
        """Reads the usage of an answer that is no stream."""
        self._count(content)

    def text(self) -> tuple[str, int]:
        """Returns the beginning of the answer, and the number of omitted bytes."""
        return self._text.decode(errors="replace"), self._received - len(self._text)

    def _last_event(self, piece: bytes) -> int | None:
        seen = self._tail + piece
        self._tail = seen[-_LONGEST_MARK:]
        found = None if self.ended else _LAST_EVENT.search(seen)
        if found is None:
            return None
        self.ended = True
        place = found.start() - (len(seen) - len(piece))
        return place if place >= 0 else None

    def _read(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        if self._gemini and any(word in line for word in _GEMINI_ENDS):
            self.ended = True
        if b'"usage' in line:
            self._count(line.removeprefix(b"data:"))

    def _count(self, content: bytes) -> None:
        try:
            message = msgspec.json.decode(content, type=_Message)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return
        for holder in (message, message.message, message.response):
            usage = holder.usage if holder is not None else None
            if usage is not None:
                prompt = usage.prompt_tokens or usage.input_tokens or 0
                sampled = usage.completion_tokens or usage.output_tokens or 0
                # Events repeat the counts so far.
                self._at_least(prompt, sampled)
        if (counted := message.metadata) is not None:
            thought = counted.thoughts_token_count or 0
            sampled = (counted.candidates_token_count or 0) + thought
            self._at_least(counted.prompt_token_count or 0, sampled)

    def _at_least(self, prompt: int, sampled: int) -> None:
        self.prompt_tokens = max(self.prompt_tokens, min(prompt, MAX_TOKENS))
        self.sampled_tokens = max(self.sampled_tokens, min(sampled, MAX_TOKENS))


def called_turn(
    name: str,
    kind: str,
    request: bytes,
    answer: ExternalAnswer,
    *,
    recorded_bytes: int,
    whole: bool,
) -> common_pb2.Turn:
    """Returns the record of a call, without the session's fields. Of a long request it has the end,
    since the latest messages are there. `whole`: the agent got the whole answer."""
    asked = request[max(0, len(request) - recorded_bytes) :] if recorded_bytes else b""
    record: dict[str, Any] = {"request": asked.decode(errors="replace")}
    if len(asked) < len(request):
        record["omitted_request_bytes"] = len(request) - len(asked)
    if kind != "embeddings":
        record["response"], omitted = answer.text()
        if omitted:
            record["omitted_response_bytes"] = omitted
    return common_pb2.Turn(
        finish_reason=common_pb2.FINISH_REASON_STOP if whole else common_pb2.FINISH_REASON_ABORTED,
        messages_json=msgspec.json.encode(record).decode(),
        other_model=common_pb2.OtherModel(
            name=name,
            kind=kind,
            prompt_tokens=answer.prompt_tokens,
            sampled_tokens=answer.sampled_tokens,
        ),
    )
