"""Converts the conversation of an Anthropic request to messages.

Owns the decoding of the new part (see `forge.core.conversation.request_prefix`) and the rules from
content blocks to messages. They depend only on the blocks, so an answer that an agent sends back
becomes the recorded message again:

- text blocks are joined without a separator, also those of `system`;
- in an assistant's message, `tool_use` blocks are its calls and `thinking` its reasoning, at any
  position; signatures are not verified, and redacted thinking is skipped, because missing reasoning
  agrees with any reasoning;
- a user's message is split at its `tool_result` blocks: each is one tool message, and the text
  before, between and after them makes user messages, in order;
- the result of a failed tool begins with "Error", because chat templates have no such flag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from forge.core.conversation.messages import Message, ToolCall, normal_role
from forge.core.conversation.request_prefix import History
from forge.core.errors import InvalidArgument
from services.gateway.http.anthropic.schema import CountTokensRequest
from services.gateway.http.message_parts.images import GivenImage, ImagePolicy, refuse
from services.gateway.http.message_parts.message_array import ArrayReader, with_first
from services.gateway.http.message_parts.prefill import split_prefill
from services.gateway.http.message_parts.user_content import (
    Heard,
    heard_image,
    heard_message,
    user_messages,
)
from services.gateway.http.request_fields.request_body import UNREADABLE

_USER = re.compile(rb'"role"\s*:\s*"user"')

ACCOUNTING = "x-anthropic-billing-header:"
"""Begins the accounting line that Claude Code puts before its system prompt. The line differs in
each call; without its removal every call would be a branch."""


class Source(msgspec.Struct):
    """The source of an `image` block."""

    type: str = ""
    media_type: str = ""
    data: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """Base64 text of an image; blocks of other types have other data."""
    url: str = ""


class Block(msgspec.Struct):
    """A content block of any type, with the fields of all types."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """In the agent's own spelling, so that no number is rounded."""
    tool_use_id: str = ""
    content: str | list[Block] | dict[str, Any] | None = None
    """Text or blocks of a tool result. Block types with an object here are refused."""
    is_error: bool | None = None
    source: Source | None = None


class _Role(msgspec.Struct):
    role: str


class InputMessage(msgspec.Struct):
    """A message of the request."""

    role: str
    content: str | list[Block]


def messages_of(request: CountTokensRequest, images: ImagePolicy = refuse) -> History:
    """Returns the conversation, system prompt first. Reading an unsupported or misplaced block
    raises `InvalidArgument` with its place."""
    messages, system = bytes(request.messages).strip(), bytes(request.system).strip()
    if not messages.startswith(b"["):
        raise InvalidArgument("messages must be an array")
    has_system = system != b"null"
    if ACCOUNTING.encode() in system:
        system = _without_accounting(system)
    if has_system:
        messages = with_first(b'{"role":"system","content":' + system + b"}", messages)
    return History(messages, _Reader(array=messages, has_system=has_system, images=images))


def prefill_of(request: CountTokensRequest, messages: History) -> tuple[Sequence[Message], str]:
    """Returns the messages of the prompt and the beginning of the answer, "" for none."""
    return (
        split_prefill(messages) if _ends_with_assistant(bytes(request.messages)) else (messages, "")
    )


def _ends_with_assistant(array: bytes) -> bool:
    """Returns True if the last message is the assistant's; most requests end before the decoder."""
    at = array.rfind(b'"assistant"')
    if at < 0 or _USER.search(array, at):
        return False
    try:
        roles = msgspec.json.decode(array, type=list[_Role])
    except UNREADABLE:
        return False  # The decoder will raise the error with its place.
    return bool(roles) and roles[-1].role == "assistant"


def _without_accounting(system: bytes) -> bytes:
    """Removes the accounting line, so that all calls have the same system prompt."""
    try:
        message = InputMessage(
            role="system", content=msgspec.json.decode(system, type=str | list[Block])
        )
        return msgspec.json.encode("".join(part.content for part in _system(message)))
    except (InvalidArgument, *UNREADABLE):
        # The decoder will raise the error with its place.
        return system


class _Reader(ArrayReader[InputMessage]):
    item_type = InputMessage
    array_name = "messages"
    system_name = "system"

    def messages(self, item: InputMessage, where: str, *, is_system: bool) -> Iterable[Message]:
        return _system(item) if is_system else _messages(item, where, self.images)


def _system(message: InputMessage) -> Iterable[Message]:
    content = message.content
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [_text(block, f"system[{at}]") for at, block in enumerate(content)]
    text = "".join(
        text.partition("\n")[2] if text.startswith(ACCOUNTING) else text for text in texts
    )
    return (Message(role="system", content=text),) if text else ()


def _messages(message: InputMessage, where: str, images: ImagePolicy) -> Iterable[Message]:
    try:
        role = normal_role(message.role)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None
    if role == "tool":
        raise InvalidArgument(f"{where}: tool results must be tool_result blocks of the user")
    if isinstance(message.content, str):
        return (Message(role=role, content=message.content),)
    if role == "assistant":
        return (_assistant(message.content, where),)
    if role == "user":
        return _user(message.content, where, images)
    return (Message(role=role, content=_texts(message.content, where)),)


def _assistant(blocks: Sequence[Block], where: str) -> Message:
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at, block in enumerate(blocks):
        match block.type:
            case "tool_use":
                calls.append(_call(block, f"{where}.content[{at}]"))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case _:
                text.append(_text(block, f"{where}.content[{at}]"))
    return Message(
        role="assistant",
        content="".join(text),
        reasoning="\n\n".join(filter(None, thoughts)),
        tool_calls=tuple(calls),
    )


def _user(blocks: Sequence[Block], where: str, images: ImagePolicy) -> Iterator[Message]:
    return user_messages(
        [
            _result(block, f"{where}.content[{at}]", images)
            if block.type == "tool_result"
            else _heard(block, f"{where}.content[{at}]", images)
            for at, block in enumerate(blocks)
        ]
    )


def _call(block: Block, where: str) -> ToolCall:
    try:
        arguments = bytes(block.input).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{where}.input is not valid: {error}") from None
    if not block.name or not arguments.lstrip().startswith("{"):
        raise InvalidArgument(
            f"{where}: a tool_use block must have a name, and an object as its input"
        )
    return ToolCall(name=block.name, arguments=arguments, call_id=block.id)


def _result(block: Block, where: str, images: ImagePolicy) -> Message:
    if not block.tool_use_id:
        raise InvalidArgument(f"{where}: a tool_result block needs its tool_use_id")
    content = "" if block.content is None else block.content
    if isinstance(content, dict):
        raise InvalidArgument(f"{where}.content must be text or blocks of text")
    heard: list[Heard] = [(content, None)] if isinstance(content, str) else []
    for at, inner in enumerate(() if isinstance(content, str) else content):
        heard.append(_heard(inner, f"{where}.content[{at}]", images))
    message = heard_message("tool", heard, tool_call_id=block.tool_use_id)
    text = message.content
    if block.is_error and not text.lower().startswith("error"):
        return replace(message, content=f"Error: {text}" if text else "Error")
    return message


def _texts(blocks: Sequence[Block], where: str) -> str:
    return "".join(_text(block, f"{where}.content[{at}]") for at, block in enumerate(blocks))


def _heard(block: Block, where: str, images: ImagePolicy) -> Heard:
    """Returns the text of a block, and its image."""
    if block.type != "image":
        return _text(block, where), None
    source = block.source or Source()
    data = bytes(source.data).decode(errors="replace").strip('"')
    image = GivenImage(part="image", media_type=source.media_type, base64=data, url=source.url)
    return heard_image(image, images, where)


def _text(block: Block, where: str) -> str:
    if block.type != "text":
        raise InvalidArgument(
            f"{where}: a block of type {block.type[:40]!r} is not supported here; use text"
        )
    if block.text is None:
        raise InvalidArgument(f"{where}: a text block needs its text")
    return block.text
