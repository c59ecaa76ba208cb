"""Events of a streamed response, in the order of OpenAI's API.

Owns the open item and its text. An item is added, filled and closed before the next one begins;
every event has a sequence number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.core.conversation.messages import ToolCall
from forge.core.formats import CallDelta, Delta, ReasoningDelta, TextDelta
from services.gateway.http.errors import Failure
from services.gateway.http.openai.responses.items import (
    Head,
    Item,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
    usage,
    with_logprobs,
)

Event = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class _Open:
    """The open item, which receives text."""

    kind: type[TextDelta] | type[ReasoningDelta]
    item_id: str
    pieces: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of its text in event types."""
        return "reasoning_text" if self.kind is ReasoningDelta else "output_text"

    def item(self, text: str | None, status: str) -> Item:
        make = reasoning_item if self.kind is ReasoningDelta else message_item
        return make(self.item_id, text, status=status)

    def part(self, text: str) -> dict[str, Any]:
        return reasoning_part(text) if self.kind is ReasoningDelta else text_part(text)

    def logprobs(self) -> dict[str, Any]:
        """Returns the field that the schema requires; log-probs are in the last event."""
        return {} if self.kind is ReasoningDelta else {"logprobs": []}


class Events:
    """Converts deltas to events."""

    def __init__(self, head: Head, *, one_end: bool = False) -> None:
        """`one_end`: a failed response ends with `response.failed` alone, as over WebSocket, where
        clients take an `error` event for the end. In a stream of HTTP an `error` event precedes it,
        because SDKs raise nothing else."""
        self._head = head
        self._one_end = one_end
        self._number = 0
        self._output: list[Item] = []
        """Closed items."""
        self._open: _Open | None = None

    def start(self) -> Iterator[Event]:
        """Yields the first events."""
        response = self._head.response("in_progress", [])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add_deltas(self, deltas: Iterable[Delta]) -> Iterator[Event]:
        """Yields the events of new deltas."""
        for delta in deltas:
            match delta:
                case CallDelta(name=name, arguments=arguments, call_id=call_id):
                    yield from self._close("completed")
                    call = ToolCall(name=name, arguments=arguments, call_id=call_id)
                    yield from self._call(call)
                case TextDelta(text=text) | ReasoningDelta(text=text):
                    yield from self._text(type(delta), text)

    def finish(
        self,
        status: str,
        spent: Mapping[str, Any],
        details: Mapping[str, Any],
        logprobs: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[Event]:
        """Yields the last events; `status` is completed or incomplete, `details` has the reason."""
        yield from self._close(status)
        if status == "completed" and all(item["type"] == "reasoning" for item in self._output):
            # Agents expect a message item, also in an empty answer.
            yield from self._text(TextDelta, "")
            yield from self._close(status)
        output = with_logprobs(self._output, logprobs)
        response = self._head.response(status, output, usage=spent, **details)
        yield self._event(f"response.{status}", response=response)

    def finish_without_output(self) -> Iterator[Event]:
        """Yields the last event of a response that samples nothing."""
        nothing = usage(prompt_tokens=0, cached_tokens=0, sampled_tokens=0, reasoning_tokens=0)
        response = self._head.response("completed", [], usage=nothing)
        yield self._event("response.completed", response=response)

    def refuse(self, failure: Failure) -> Iterator[Event]:
        """Yields all events of a response that failed before its first token."""
        yield from self.start()
        yield from self.fail(
            failure.code, failure.message, kind="invalid_request_error", param=failure.param
        )

    def fail(
        self, code: str, message: str, *, kind: str = "server_error", param: str | None = None
    ) -> Iterator[Event]:
        """Yields the last events of a failed response; `kind` is the type of the error."""
        yield from self._close("incomplete")
        if not self._one_end:
            error = {"type": kind, "code": code, "message": message, "param": param}
            yield self._event("error", code=code, message=message, param=param, error=error)
        error = {"code": code, "message": message}
        response = self._head.response("failed", self._output, error=error)
        yield self._event("response.failed", response=response)

    def _text(self, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind is not kind:
            yield from self._close("completed")
            prefix = "rs" if kind is ReasoningDelta else "msg"
            item_id = self._head.item_id(prefix, len(self._output))
            self._open = _Open(kind=kind, item_id=item_id)
            item = self._open.item(None, "in_progress")
            yield self._item_event("response.output_item.added", item=item)
            yield self._part_event("response.content_part.added", part=self._open.part(""))
        if text:
            opened = self._open
            opened.pieces.append(text)
            yield self._part_event(f"response.{opened.name}.delta", delta=text, **opened.logprobs())

    def _call(self, call: ToolCall) -> Iterator[Event]:
        # A call arrives complete: until its end it may still be text that does not parse.
        at = len(self._output)
        started = call_item(self._head, at, call, status="in_progress")
        item = call_item(self._head, at, call)
        yield self._item_event("response.output_item.added", item=started)
        if item["type"] == "custom_tool_call":
            kind, text = "response.custom_tool_call_input", {"input": item["input"]}
        else:
            kind = "response.function_call_arguments"
            text = {"name": item["name"], "arguments": item["arguments"]}
        delta = item.get("input", call.arguments)
        yield self._item_event(f"{kind}.delta", item_id=item["id"], delta=delta)
        yield self._item_event(f"{kind}.done", item_id=item["id"], **text)
        yield self._item_event("response.output_item.done", item=item)
        self._output.append(item)

    def _close(self, status: str) -> Iterator[Event]:
        """Closes the open item, if any."""
        opened = self._open
        if opened is None:
            return
        text = "".join(opened.pieces)
        yield self._part_event(f"response.{opened.name}.done", text=text, **opened.logprobs())
        yield self._part_event("response.content_part.done", part=opened.part(text))
        item = opened.item(text, status)
        yield self._item_event("response.output_item.done", item=item)
        self._open = None
        self._output.append(item)

    def _part_event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None, "only an open item has parts"
        return self._item_event(kind, item_id=self._open.item_id, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}
