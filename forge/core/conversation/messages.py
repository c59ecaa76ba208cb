"""Chat messages in one canonical form, and when two of them are the same message.

Owns the tolerance rules of history matching. Owns no protocol (the edges translate OpenAI, gRPC and
others to and from `Message`) and no template.

Agents rarely return exactly the message they got: they drop the reasoning, re-serialize tool
arguments, invent new call ids, trim text. Two messages are the same when

- their roles are equal, "developer" counting as "system";
- their contents are equal; an assistant's contents are compared without white space at the ends,
  and absent content equals empty content;
- their tool calls have the same names, in the same order, and arguments equal as JSON: key order,
  white space, escapes and 1.0 against 1 do not matter. Arguments that are not JSON are compared
  as text. Call ids do not matter, here and in tool results;
- their `name` fields are equal, or one of two assistants has none: frameworks add the name of
  their agent to the model's message;
- their reasoning is equal, or one of them has none.

`agree` compares the optional fields, the `key` has all others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forge.core.errors import InvalidArgument

ROLES = frozenset({"system", "user", "assistant", "tool"})
ALIASES = {"developer": "system", "function": "tool"}

MessageKey = tuple[str, str, tuple[tuple[str, str], ...], str]
"""Role, content, (name, arguments) of each call, name unless an assistant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call the model made."""

    name: str
    arguments: str
    """JSON text; an object unless an agent invented it."""
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image that a text in the content of its message stands for."""

    media_type: str
    size_bytes: int | None = None
    """None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    reasoning: str = ""
    """Reasoning of an assistant, if the model's format separates it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """In a tool result: the call that it answers."""
    name: str = ""
    images: tuple[Image, ...] = ()
    """In the order of their texts. Messages are compared by their texts, without
    images."""

    @property
    def key(self) -> MessageKey:
        """Equal for messages that differ at most in optional fields."""
        if self.role != "assistant":
            return (self.role, self.content, (), self.name)
        calls = tuple((call.name, canonical_json(call.arguments)) for call in self.tool_calls)
        return (self.role, self.content.strip(), calls, "")

    @property
    def call_ids(self) -> tuple[str, ...]:
        """Ids of the calls, in order."""
        return tuple(call.call_id for call in self.tool_calls)


def normal_role(role: str) -> str:
    """Return the role's name in templates. Raises `InvalidArgument` for an unknown role."""
    role = ALIASES.get(role, role)
    if role not in ROLES:
        raise InvalidArgument(f"role {role[:40]!r} must be system, user, assistant or tool")
    return role


def agree(ours: Message, theirs: Message) -> bool:
    """Whether messages with equal keys are the same: their common optional fields are equal."""
    if ours.name and theirs.name and ours.name != theirs.name:
        return False
    if not ours.reasoning or not theirs.reasoning:
        return True
    return ours.reasoning.strip() == theirs.reasoning.strip()


def same(ours: Message, theirs: Message) -> bool:
    """Whether two messages are the same; cheap for equal texts, the usual case."""
    alike = (
        ours.content == theirs.content
        and ours.role == theirs.role
        and ours.name == theirs.name
        and not ours.tool_calls
        and not theirs.tool_calls
    )
    return (alike or ours.key == theirs.key) and agree(ours, theirs)


def canonical_json(text: str) -> str:
    """Return one text for all texts of a JSON value; other texts are trimmed."""
    try:
        value = json.loads(text or "{}", parse_float=_number)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text.strip()


def _number(digits: str) -> float | int:
    """Read 1.0 as 1: Python's JSON writer distinguishes them."""
    value = float(digits)
    return int(value) if value.is_integer() else value


def to_openai(message: Message) -> dict[str, Any]:
    """Return an OpenAI chat message, without empty fields except content."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    if message.images:
        plain["images"] = [
            {"media_type": image.media_type, "size_bytes": image.size_bytes}
            for image in message.images
        ]
    return plain


def from_openai(plain: Mapping[str, Any]) -> Message:
    """Read the output of `to_openai`."""
    return Message(
        role=plain["role"],
        content=plain["content"],
        reasoning=plain.get("reasoning_content", ""),
        tool_calls=tuple(
            ToolCall(
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
                call_id=call["id"],
            )
            for call in plain.get("tool_calls", ())
        ),
        tool_call_id=plain.get("tool_call_id", ""),
        name=plain.get("name", ""),
        images=tuple(Image(**image) for image in plain.get("images", ())),
    )
