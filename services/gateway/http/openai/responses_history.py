"""From the items of a Responses request to messages.

Owns which items belong to one answer. The model says one thing per turn, and the API splits it:
its reasoning, its text and each tool call are items of their own. Put together again they must be
the message that was sampled, or the history would branch where the agent only repeated it.

Items that carry an id of ours name the turn they come from. Clients that leave the ids out are
read by what an answer looks like: reasoning comes first, and two texts are never neighbors.

A request that begins with an earlier one is read from there on (see
`forge.core.conversation.request_prefix`), unless what is new in it may belong to an answer that was
there before.
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
from services.gateway.http.openai.responses_items import key_of_item

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})

_ITEM_KEY = re.compile(rb"(?:msg|rs|fc)_([0-9a-f]{32})_[0-9]")
"""Of items of ours, as bytes: more may look like one than are."""

_Kind = TypeVar("_Kind")


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    id: str | None = None


class ReasoningItem(msgspec.Struct):
    content: list[Part] | None = None
    summary: list[Part] | None = None
    id: str | None = None


class FunctionCallItem(msgspec.Struct):
    call_id: str
    name: str
    arguments: str = ""
    id: str | None = None


class FunctionCallOutputItem(msgspec.Struct):
    call_id: str
    output: str | list[Part] | None = None


def history_of(given: bytes, instructions: str | None) -> Sequence[Message]:
    """The conversation of a request without references to earlier ones, instructions first; `given`
    is its `input`. Who looks at an item that cannot be had gets the `InvalidArgument` naming it."""
    array = given.strip()
    if not array.startswith(b"["):
        before = [Message(role="system", content=instructions)] if instructions else []
        return [*before, *messages_of(items_of(given))]
    if instructions:
        # One array, so that a request is recognized by both.
        item = msgspec.json.encode({"role": "system", "content": instructions})
        comma = b"" if array[1:].lstrip().startswith(b"]") else b","
        array = b"[" + item + comma + array[1:]
    return _InputHistory(array, _Reader(array=array, instructed=bool(instructions)))


def items_of(given: bytes) -> str | list[dict[str, Any]]:
    """The whole `input`; raises `InvalidArgument` for what is no input, or an empty one."""
    try:
        items = msgspec.json.decode(given, type=str | list[dict[str, Any]] | None)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        wrong = str(error)
        wrong = wrong.replace("`$", "`$.input") if "`$" in wrong else f"{wrong} - at `$.input`"
        raise InvalidArgument(f"the request body is not valid: {wrong}") from None
    if items is None or items == []:
        raise InvalidArgument("input must not be empty")
    return items


class _InputHistory(History):
    """Several items make one message, so a mark holds only between whole ones."""

    __slots__ = ()

    def known(self, marks: Iterable[Mark]) -> Mark | None:
        """As `History.known`; None where an item behind the mark names a turn before it, too."""
        mark = super().known(marks)
        if mark is None:
            return None
        before = bytes(self._raw[: mark.size_bytes])
        behind = set(_ITEM_KEY.findall(bytes(self._raw[mark.size_bytes :])))
        return None if any(key in before for key in behind) else mark

    def mark(self) -> Mark:
        """As `History.mark`; one that recognizes nothing where the last answer may still grow."""
        mark = super().mark()
        read = self._all if self._all is not None else self._behind[1] if self._behind else ()
        return replace(mark, digest=b"") if read and read[-1].role == "assistant" else mark


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Decodes the items of a request, or those at its end."""

    array: bytes
    """The whole of it."""
    instructed: bool

    def __call__(self, array: bytes, first: int) -> list[Message]:
        if first:
            with suppress(InvalidArgument, msgspec.MsgspecError, UnicodeDecodeError):
                return messages_of(msgspec.json.decode(array, type=list[dict[str, Any]]))
            # To say where the error is, all items have to be read.
            return self(self.array, 0)[first:]
        items = items_of(array)
        assert isinstance(items, list)
        if len(items) == self.instructed:
            raise InvalidArgument("input must not be empty")
        return messages_of(items, first=-int(self.instructed))


def messages_of(items: str | Sequence[dict[str, Any]] | None, *, first: int = 0) -> list[Message]:
    """The messages that `input` stands for, whose first item has this number. Raises
    `InvalidArgument` naming the item."""
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    history = _History()
    for at, item in enumerate(items or (), first):
        try:
            history.add(item)
        except InvalidArgument as error:
            raise InvalidArgument(f"input[{at}]: {error}") from None
    return history.messages()


@dataclass(slots=True, kw_only=True)
class _Answer:
    """One message of the assistant in the making."""

    response: str | None
    """The key of the response its items come from; None while unknown."""
    last: str = ""
    """Type of the item added last."""
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def takes(self, kind: str, response: str | None) -> bool:
        """Whether an item behind this answer is a part of it."""
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
    """Messages so far; the last answer may still grow."""

    def __init__(self) -> None:
        self._entries: list[Message | _Answer] = []
        self._answer: _Answer | None = None
        """The last answer, while nothing but tool results stands behind it."""

    def messages(self) -> list[Message]:
        return [entry.message() if isinstance(entry, _Answer) else entry for entry in self._entries]

    def add(self, item: dict[str, Any]) -> None:
        kind = item.get("type") or "message"
        match kind:
            case "message":
                self._message(_as(item, MessageItem))
            case "reasoning":
                self._reasoning(_as(item, ReasoningItem))
            case "function_call":
                call = _as(item, FunctionCallItem)
                self._part("function_call", call.id).calls.append(
                    ToolCall(name=call.name, arguments=call.arguments, call_id=call.call_id)
                )
            case "function_call_output":
                output = _as(item, FunctionCallOutputItem)
                self._entries.append(
                    Message(role="tool", content=_text(output.output), tool_call_id=output.call_id)
                )
            case _:
                raise InvalidArgument(f"items of type {str(kind)[:40]!r} are not supported")

    def _message(self, item: MessageItem) -> None:
        role = normal_role(item.role)
        if role == "tool":
            raise InvalidArgument("the result of a tool is an item of type 'function_call_output'")
        content = _text(item.content)
        if role == "assistant":
            self._part("message", item.id).content.append(content)
        else:
            self._answer = None
            self._entries.append(Message(role=role, content=content))

    def _reasoning(self, item: ReasoningItem) -> None:
        # Of an item that has both, the summary is a shorter telling of the same.
        self._part("reasoning", item.id).reasoning.append(_text(item.content or item.summary))

    def _part(self, kind: str, given_id: str | None) -> _Answer:
        """The answer that an item of the assistant's belongs to."""
        response = key_of_item(given_id)
        answer = self._answer
        if answer is None or not self._continues(answer, kind, response):
            answer = self._answer = _Answer(response=response)
            self._entries.append(answer)
        answer.response = answer.response or response
        answer.last = kind
        return answer

    def _continues(self, answer: _Answer, kind: str, response: str | None) -> bool:
        if self._entries[-1] is answer:
            return answer.takes(kind, response)
        # Some clients put each result directly behind its call. Without ids that is how several
        # turns of one call each look, too.
        return response is not None and response == answer.response


def _as(item: dict[str, Any], kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error)) from None


def _text(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXTS and part.type != "refusal":
            raise InvalidArgument(f"content of type {part.type[:40]!r}; the model takes text only")
    return "".join(part.text or part.refusal or "" for part in content)
