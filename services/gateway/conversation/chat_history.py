"""Messages of a gRPC Chat request; only the new ones are decoded.

Protobuf writes repeated messages one after the other, each with its length. So the bytes of a
continued history begin with its earlier bytes, and the rest is a valid history too.
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
        """Reading a message with an unknown role raises `InvalidArgument`."""
        alone = gateway_pb2.ChatRequest(messages=messages)
        super().__init__(alone.SerializeToString(deterministic=True), _read)

    def _rest(self, size_bytes: int) -> bytes:
        return bytes(self._raw[size_bytes:])

    def _last_message_end(self) -> int:
        return len(self._raw)

    def _ends_message(self, size_bytes: int) -> bool:
        # A prefix that was a history once has the same messages in every request.
        return size_bytes <= len(self._raw)


def _read(encoded: bytes, first: int) -> list[Message]:
    messages = gateway_pb2.ChatRequest.FromString(encoded).messages
    return [_message(message, at) for at, message in enumerate(messages, first)]


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
