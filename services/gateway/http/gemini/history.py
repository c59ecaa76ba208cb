"""Converts the conversation of a Gemini request to messages.

Owns the decoding of the new part (see `forge.core.conversation.request_prefix`) and the rules from
parts to messages. They depend only on the parts, so an answer that an agent sends back becomes the
recorded message again:

- texts are joined without a separator, also those of `systemInstruction`;
- in the model's content, `thought` parts are its reasoning and `functionCall` parts its calls, at
  any position; signatures are not verified;
- a user's content is split at its `functionResponse` parts: each is one tool message. A response
  with only a text named `result` or `output` is that text; any other is its JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from forge.core.conversation.messages import Message, ToolCall
from forge.core.conversation.request_prefix import History
from forge.core.errors import InvalidArgument
from services.gateway.http.gemini.schema import GenerateContentRequest, shown
from services.gateway.http.message_parts.images import GivenImage, ImagePolicy
from services.gateway.http.message_parts.message_array import ArrayReader, with_first
from services.gateway.http.message_parts.prefill import split_prefill
from services.gateway.http.message_parts.user_content import Heard, heard_image, user_messages
from services.gateway.http.request_fields.request_body import UNREADABLE

_RESULTS = frozenset({"result", "output"})
_USER = re.compile(rb'"role"\s*:\s*"user"')


class InlineData(msgspec.Struct, rename="camel"):
    """`inlineData`."""

    mime_type: str = ""
    data: str = ""


class FileData(msgspec.Struct, rename="camel"):
    """`fileData`."""

    mime_type: str = ""
    file_uri: str = ""


class FunctionCall(msgspec.Struct):
    """`functionCall`."""

    name: str
    args: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"{}"))
    """In the agent's own spelling, so that no number is rounded."""
    id: str | None = None


class FunctionResponse(msgspec.Struct):
    """`functionResponse`."""

    name: str
    response: dict[str, Any] = {}
    id: str | None = None


class Part(msgspec.Struct, rename="camel"):
    """A part of any kind."""

    text: str | None = None
    thought: bool | None = None
    inline_data: InlineData | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    executable_code: Any = None
    code_execution_result: Any = None
    snake_inline_data: dict[str, Any] | None = msgspec.field(default=None, name="inline_data")


class Content(msgspec.Struct):
    """A message of the request."""

    parts: list[Part] = []
    role: str = "user"


def messages_of(request: GenerateContentRequest, images: ImagePolicy) -> History:
    """Returns the conversation, system instruction first. Reading an unsupported part raises
    `InvalidArgument` with its place."""
    contents, system = bytes(request.contents).strip(), request.system.strip()
    if contents.startswith(b"{"):
        contents = b"[" + contents + b"]"
    if not contents.startswith(b"["):
        raise InvalidArgument("contents must be an array")
    has_system = system != b"null"
    if has_system:
        contents = with_first(_as_system(system), contents)
    return History(contents, _Reader(array=contents, has_system=has_system, images=images))


def prefill_of(request: GenerateContentRequest, messages: History) -> tuple[Sequence[Message], str]:
    """Returns the messages of the prompt and the beginning of the answer, "" for none."""
    array = bytes(request.contents)
    at = array.rfind(b'"model"')
    # Most requests end before the decoder.
    if at < 0 or _USER.search(array, at) or not len(messages) or messages[-1].role != "assistant":
        return messages, ""
    return split_prefill(messages)


def _as_system(system: bytes) -> bytes:
    """Returns the system instruction, a content or a text, as a content of the role system."""
    try:
        content = msgspec.json.decode(system, type=str | dict[str, msgspec.Raw])
    except UNREADABLE as error:
        raise InvalidArgument(f"systemInstruction is not valid: {error}") from None
    parts: Any = [{"text": content}] if isinstance(content, str) else content.get("parts", [])
    if isinstance(parts, msgspec.Raw) and bytes(parts).startswith(b"{"):
        parts = [parts]
    return msgspec.json.encode({"role": "system", "parts": parts})


class _Reader(ArrayReader[Content]):
    item_type = Content
    array_name = "contents"
    system_name = "systemInstruction"

    def messages(self, item: Content, where: str, *, is_system: bool) -> Iterable[Message]:
        return _messages(item, where, self.images)


def _messages(content: Content, where: str, images: ImagePolicy) -> Iterable[Message]:
    match content.role:
        case "model":
            return (_answer(content.parts, where),)
        case "user" | "function" | "":
            return _user(content.parts, where, images)
        case "system":
            text = "".join(_text(part, f"{where}.parts[{at}]") for at, part in _each(content))
            return (Message(role="system", content=text),) if text else ()
        case other:
            raise InvalidArgument(f"{where}: role {other[:40]!r} is neither user nor model")


def _each(content: Content) -> Iterator[tuple[int, Part]]:
    return iter(enumerate(content.parts))


def _answer(parts: Sequence[Part], where: str) -> Message:
    text: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for at, part in enumerate(parts):
        if part.function_call is not None:
            calls.append(_call(part.function_call, f"{where}.parts[{at}]"))
        elif part.thought:
            thoughts.append(part.text or "")
        else:
            text.append(_text(part, f"{where}.parts[{at}]"))
    return Message(
        role="assistant",
        content="".join(text),
        reasoning="".join(thoughts),
        tool_calls=tuple(calls),
    )


def _user(parts: Sequence[Part], where: str, images: ImagePolicy) -> Iterator[Message]:
    return user_messages(
        [
            _result(part.function_response)
            if part.function_response is not None
            else _seen(part, f"{where}.parts[{at}]", images)
            for at, part in enumerate(parts)
        ]
    )


def _seen(part: Part, where: str, images: ImagePolicy) -> Heard:
    """Returns the text of a part, and the image that it stands for."""
    given = part.inline_data
    if part.snake_inline_data is not None:
        snake = part.snake_inline_data
        mime_type = str(snake.get("mime_type") or snake.get("mimeType") or "")
        given = InlineData(mime_type=mime_type, data=str(snake.get("data") or ""))
    kind = given or part.file_data
    if kind is None:
        return _text(part, where), None
    if not kind.mime_type.lower().startswith("image/"):
        raise InvalidArgument(
            f"{where}: data of type {kind.mime_type[:40]!r} is not supported; the model takes text"
        )
    data = kind.data if isinstance(kind, InlineData) else ""
    image = GivenImage(part="inlineData", media_type=kind.mime_type, base64=data)
    return heard_image(image, images, where)


def _call(call: FunctionCall, where: str) -> ToolCall:
    try:
        arguments = bytes(call.args).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{where}.functionCall.args is not valid: {error}") from None
    if not call.name or not arguments.lstrip().startswith(("{", "null")):
        raise InvalidArgument(
            f"{where}: a functionCall must have a name, and an object as its args"
        )
    arguments = "{}" if arguments == "null" else arguments
    return ToolCall(name=call.name, arguments=arguments, call_id=call.id or "")


def _result(given: FunctionResponse) -> Message:
    ((name, value),) = given.response.items() if len(given.response) == 1 else (("", None),)
    text = value if name in _RESULTS and isinstance(value, str) else shown(given.response)
    return Message(role="tool", content=text, tool_call_id=given.id or "", name=given.name)


def _text(part: Part, where: str) -> str:
    if part.text is None:
        names = {one.name: one.encode_name for one in msgspec.structs.fields(Part)}
        kinds = [names[name] for name in names if getattr(part, name) is not None]
        raise InvalidArgument(
            f"{where}: a part with {kinds or 'an unknown field'} is not supported here; use text"
        )
    return part.text
