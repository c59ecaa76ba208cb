"""Converts the items of a Responses request to messages.

Owns the grouping of items into answers. The API splits an answer into items: reasoning, text and
each tool call. Joined again they must equal the sampled message; otherwise the history branches.

An item with an id of this API names its turn. Items without ids are grouped by the form of an
answer: reasoning comes first, and two texts are never adjacent.

If a request begins with an earlier one, only the rest is decoded (see
`forge.core.conversation.request_prefix`), unless a new item may belong to an earlier answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from forge.core.conversation.messages import Message, ToolCall, normal_role
from forge.core.conversation.request_prefix import History, Mark
from forge.core.errors import InvalidArgument
from services.gateway.errors import InvalidField
from services.gateway.http.message_parts.images import ImagePolicy, refuse
from services.gateway.http.message_parts.message_array import with_first
from services.gateway.http.openai.content import Part, content_of
from services.gateway.http.openai.responses.items import RAW_CUSTOM, key_of_item
from services.gateway.http.openai.responses.tools import arguments_of, flat_name
from services.gateway.http.request_fields.request_body import UNREADABLE, place_in, wrong_json

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})

_ITEM_KEY = re.compile(rb"(?:msg|rs|fc|ctc|ctr)_([0-9a-f]{32})_[0-9]")
"""Matches ids of this API's items in JSON bytes; other texts may match too."""

_Kind = TypeVar("_Kind")


class MessageItem(msgspec.Struct):
    """A `message` item."""

    role: str
    content: str | list[Part] | None = None
    id: str | None = None


class ReasoningItem(msgspec.Struct):
    """A `reasoning` item."""

    content: list[Part] | None = None
    summary: list[Part] | None = None
    id: str | None = None


class FunctionCallItem(msgspec.Struct):
    """A `function_call` item."""

    call_id: str
    name: str
    arguments: str = ""
    namespace: str | None = None
    id: str | None = None


class CustomToolCallItem(msgspec.Struct):
    """A `custom_tool_call` item."""

    call_id: str
    name: str
    input: str = ""
    namespace: str | None = None
    id: str | None = None


class FunctionCallOutputItem(msgspec.Struct):
    """A `function_call_output` or `custom_tool_call_output` item."""

    call_id: str
    output: str | list[Part] | None = None


def history_of(
    given: bytes, instructions: str | None, images: ImagePolicy = refuse
) -> Sequence[Message]:
    """Returns the conversation of a request without references, instructions first; `given` is its
    `input`. Reading an unsupported item raises `InvalidArgument` with its place."""
    array = given.strip()
    if not array.startswith(b"["):
        before = [Message(role="system", content=instructions)] if instructions else []
        return [*before, *messages_of(items_of(given))]
    if instructions:
        item = msgspec.json.encode({"role": "system", "content": instructions})
        array = with_first(item, array)
    reader = _Reader(array=array, instructed=bool(instructions), images=images)
    return _InputHistory(array, reader)


def items_of(given: bytes) -> str | list[dict[str, Any]]:
    """Decodes the complete `input`; raises `InvalidArgument` if it is invalid or empty."""
    try:
        items = msgspec.json.decode(given, type=str | list[dict[str, Any]] | None)
    except UNREADABLE as error:
        raise wrong_json(str(error), within="input") from None
    if items is None or items == []:
        raise InvalidField("input must not be empty", param="input")
    return items


class _InputHistory(History):
    """The messages of an input; several items make one message, so a mark must not split one."""

    __slots__ = ()

    def known(self, marks: Iterable[Mark]) -> Mark | None:
        """As `History.known`; None if an item after the mark belongs to a turn before it."""
        mark = super().known(marks)
        if mark is None:
            return None
        before = bytes(self._raw[: mark.size_bytes])
        behind = set(_ITEM_KEY.findall(bytes(self._raw[mark.size_bytes :])))
        return None if any(key in before for key in behind) else mark

    def mark(self) -> Mark:
        """As `History.mark`; matches no request while the last answer may get more items."""
        mark = super().mark()
        read = self._all if self._all is not None else self._behind[1] if self._behind else ()
        return replace(mark, digest=b"") if read and read[-1].role == "assistant" else mark


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Decodes the items of a request, or its last ones."""

    array: bytes
    """All items."""
    instructed: bool
    images: ImagePolicy

    def __call__(self, array: bytes, first: int) -> list[Message]:
        if first:
            with suppress(InvalidArgument, *UNREADABLE):
                items = msgspec.json.decode(array, type=list[dict[str, Any]])
                return messages_of(items, self.images)
            # Only a decoding of all items gives the place of the error.
            return self(self.array, 0)[first:]
        every = items_of(array)
        assert isinstance(every, list)
        if len(every) == self.instructed:
            raise InvalidField("input must not be empty", param="input")
        return messages_of(every, self.images, first=-int(self.instructed))


def messages_of(
    items: str | Sequence[dict[str, Any]] | None,
    images: ImagePolicy = refuse,
    *,
    first: int = 0,
) -> list[Message]:
    """Converts items to messages; `first` is the number of the first item. Raises `InvalidArgument`
    with the number of the item."""
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    history = _History(images)
    for at, item in enumerate(items or (), first):
        try:
            history.add_item(item)
        except InvalidArgument as error:
            below = f".{error.param}" if isinstance(error, InvalidField) and error.param else ""
            place = f"input[{at}]"
            raise InvalidField(f"{place}: {error}", param=place + below) from None
    return history.messages()


@dataclass(slots=True, kw_only=True)
class _AssistantItems:
    """One assistant message, built from items."""

    response: str | None
    """The key of the response its items come from; None while unknown."""
    last: str = ""
    """Type of the item added last."""
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def takes(self, kind: str, response: str | None) -> bool:
        """Returns True if the next item is a part of this answer."""
        if response and self.response:
            return response == self.response
        if kind == "reasoning":
            return self.last == "reasoning"
        return kind == "function_call" or self.last != "message"

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls),
        )


class _History:
    """Messages so far; the last answer may get more items."""

    def __init__(self, images: ImagePolicy) -> None:
        self._images = images
        self._entries: list[Message | _AssistantItems] = []
        self._answer: _AssistantItems | None = None
        """The last answer, while only tool results follow it."""

    def messages(self) -> list[Message]:
        return [
            entry.message() if isinstance(entry, _AssistantItems) else entry
            for entry in self._entries
        ]

    def add_item(self, item: dict[str, Any]) -> None:
        kind = item.get("type") or "message"
        match kind:
            case "message":
                self._message(_as(item, MessageItem))
            case "reasoning":
                self._reasoning(_as(item, ReasoningItem))
            case "function_call":
                call = _as(item, FunctionCallItem)
                self._call(call, call.arguments)
            case "custom_tool_call":
                custom = _as(item, CustomToolCallItem)
                raw = (custom.id or "").startswith(f"{RAW_CUSTOM}_")
                self._call(custom, custom.input if raw else arguments_of(custom.input))
            case "function_call_output" | "custom_tool_call_output":
                output = _as(item, FunctionCallOutputItem)
                self._entries.append(self._result(output))
            case _:
                raise InvalidArgument(f"items of type {str(kind)[:40]!r} are not supported")

    def _message(self, item: MessageItem) -> None:
        role = normal_role(item.role)
        if role == "tool":
            raise InvalidArgument("a tool result must be an item of type 'function_call_output'")
        if role == "assistant":
            self._part("message", item.id).content.append(_text(item.content))
        else:
            self._answer = None
            content, seen = content_of(item.content, _TEXTS, self._images)
            self._entries.append(Message(role=role, content=content, images=seen))

    def _call(self, call: FunctionCallItem | CustomToolCallItem, arguments: str) -> None:
        name = flat_name(call.name, call.namespace)
        self._part("function_call", call.id).calls.append(
            ToolCall(name=name, arguments=arguments, call_id=call.call_id)
        )

    def _result(self, output: FunctionCallOutputItem) -> Message:
        content, seen = content_of(output.output, _TEXTS, self._images)
        return Message(role="tool", content=content, tool_call_id=output.call_id, images=seen)

    def _reasoning(self, item: ReasoningItem) -> None:
        # If an item has both, the summary repeats the content.
        self._part("reasoning", item.id).reasoning.append(_text(item.content or item.summary))

    def _part(self, kind: str, given_id: str | None) -> _AssistantItems:
        """Returns the answer of an assistant's item."""
        response = key_of_item(given_id)
        answer = self._answer
        if answer is None or not self._continues(answer, kind, response):
            answer = self._answer = _AssistantItems(response=response)
            self._entries.append(answer)
        answer.response = answer.response or response
        answer.last = kind
        return answer

    def _continues(self, answer: _AssistantItems, kind: str, response: str | None) -> bool:
        if self._entries[-1] is answer:
            return answer.takes(kind, response)
        # Some clients send each result directly after its call. Without ids, several turns with
        # one call each have the same form.
        return response is not None and response == answer.response


def _text(content: str | list[Part] | None) -> str:
    return content_of(content, _TEXTS, None)[0]


def _as(item: dict[str, Any], kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise InvalidField(str(error), param=place_in(str(error))) from None
