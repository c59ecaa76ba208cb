"""The messages of a Chat over gRPC, read only as far as they are new.

Protobuf writes repeated messages one behind the other, each with its length, so the bytes of a
history that went on begin with those it had before, and what follows them is a history by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from forge.core.conversation.messages import Message, ToolCall, normal_role
from forge.core.conversation.request_prefix import History
from forge.core.errors import InvalidArgument
from forge.v1 import gateway_pb2


class ChatHistory(History):
    """A sequence of messages over their protobuf encoding."""

    __slots__ = ()

    def __init__(self, messages: Iterable[gateway_pb2.ChatMessage]) -> None:
        """Who looks at a message with an unknown role gets the `InvalidArgument` naming it."""
        alone = gateway_pb2.ChatRequest(messages=messages)
        super().__init__(alone.SerializeToString(deterministic=True), _read)

    def _rest(self, size_bytes: int) -> bytes:
        return bytes(self._raw[size_bytes:])

    def _last_message_end(self) -> int:
        return len(self._raw)

    def _ends_message(self, size_bytes: int) -> bool:
        # Bytes that were messages once are the same messages wherever something begins with them.
        return size_bytes <= len(self._raw)


def _read(encoded: bytes, first: int) -> list[Message]:
    found = gateway_pb2.ChatRequest.FromString(encoded).messages
    return [_message(message, at) for at, message in enumerate(found, first)]


def _message(message: gateway_pb2.ChatMessage, at: int) -> Message:
    try:
        role = normal_role(message.role)
    except InvalidArgument as error:
        raise InvalidArgument(f"messages[{at}]: {error}") from None
    return Message(
        role=role,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCall(name=call.name, arguments=call.arguments_json, call_id=call.id)
            for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
    )
