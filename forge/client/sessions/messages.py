"""Translation between OpenAI-shaped message dictionaries and their protos.

Contents are text: lists of parts are joined, and a part that is not text is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge.core.errors import InvalidArgument
from forge.v1 import gateway_pb2 as pb

Message = Mapping[str, Any]


def to_proto(message: Message) -> pb.ChatMessage:
    """Encode one message. Raises `InvalidArgument` for a missing role or content besides text."""
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidArgument(f"message without a role: {message!r:.200}")
    return pb.ChatMessage(
        role=role,
        content=_text(message.get("content")),
        reasoning=message.get("reasoning") or "",
        tool_call_id=message.get("tool_call_id") or "",
        tool_calls=[
            pb.ToolCall(
                id=call.get("id") or "",
                name=call["function"]["name"],
                arguments_json=call["function"]["arguments"],
            )
            for call in message.get("tool_calls") or ()
        ],
    )


def from_proto(message: pb.ChatMessage) -> dict[str, Any]:
    """Decode one message, without empty keys except content."""
    decoded: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        decoded["reasoning"] = message.reasoning
    if message.tool_call_id:
        decoded["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        decoded["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments_json},
            }
            for call in message.tool_calls
        ]
    return decoded


def _text(content: str | Sequence[Message] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise InvalidArgument(
                f"content part of type {part.get('type')!r}; only text is allowed"
            )
    return "".join(part["text"] for part in content)
