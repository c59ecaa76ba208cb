"""Prefill: a conversation that ends with the beginning of the assistant's answer.

Owns the split of such a conversation, for all protocols. The prompt ends with the text of its last
message, and the recorded answer begins with it. The response has only the new text.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.conversation.messages import Message
from services.gateway.errors import InvalidField


def split_prefill(messages: Sequence[Message]) -> tuple[Sequence[Message], str]:
    """Returns the messages before the last one, and its text.

    Raises `InvalidField` unless the last message is an assistant's, with text alone.
    """
    every = messages[:]
    if not every or every[-1].role != "assistant":
        role = every[-1].role if every else "none"
        raise InvalidField(
            f"continue_final_message: the last message has the role {role!r}, not 'assistant'",
            param="continue_final_message",
        )
    last = every[-1]
    if last.tool_calls or last.reasoning or not last.content:
        raise InvalidField(
            "continue_final_message: the last message must have text, and neither tool calls nor "
            "reasoning",
            param="continue_final_message",
        )
    return every[:-1], last.content
