"""OpenAI's response objects and their output items, made of answers.

Owns how an answer is split into items, and the ids by which they are put together again
(`responses_history`). Owns no order of events: see `responses_events`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.core.conversation.messages import Message, ToolCall
from forge.v1 import common_pb2

_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_\d+")

_BLANK: dict[str, Any] = {
    "background": False,
    "error": None,
    "incomplete_details": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
}
"""A response to a request that asked for nothing in particular."""

Item = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is the same in a response from its first event to its last."""

    key: str
    """32 hex digits that name the response; its id and those of its items are made of them."""
    created_at: float
    """Unix time, seconds."""
    model: str
    instructions: str | None
    tools: Sequence[Mapping[str, Any]]
    """As the Responses API spells them."""
    echoed: Mapping[str, Any]
    """What is repeated of the request."""

    @property
    def response_id(self) -> str:
        return f"resp_{self.key}"

    def item_id(self, kind: str, at: int) -> str:
        """The id of the output item at `at`; `kind` is msg, rs or fc."""
        return f"{kind}_{self.key}_{at}"

    def response(self, status: str, output: Sequence[Item], **changes: Any) -> dict[str, Any]:
        """The response object as it stands."""
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            **_BLANK,
            "instructions": self.instructions,
            "model": self.model,
            "output": list(output),
            "tools": list(self.tools),
            **self.echoed,
            **changes,
        }


def response_key(response_id: str) -> str:
    """The key in a response's id; "" for what is no id of ours."""
    found = _RESPONSE_ID.fullmatch(response_id)
    return found[1] if found else ""


def key_of_item(item_id: str | None) -> str | None:
    """The key of the response that an item comes from; None if its id does not tell."""
    found = _ITEM_ID.fullmatch(item_id or "")
    return found[1] if found else None


def ending(finish_reason: common_pb2.FinishReason.ValueType) -> tuple[str, dict[str, Any]]:
    """The status of a response whose answer ended like this, and what else it says of it."""
    if finish_reason == common_pb2.FINISH_REASON_LENGTH:
        return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
    return "completed", {}


def usage(
    *, prompt_tokens: int, cached_tokens: int, sampled_tokens: int, reasoning_tokens: int
) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + sampled_tokens,
    }


def output_of(head: Head, answer: Message, status: str) -> list[Item]:
    """The items of a whole answer; of an incomplete one the last text is what is incomplete."""
    items: list[Item] = []
    if answer.reasoning:
        items.append(reasoning_item(head.item_id("rs", 0), answer.reasoning))
    if answer.content or (status == "completed" and not answer.tool_calls):
        # An empty answer is an answer: agents look for its message.
        at = len(items)
        items.append(message_item(head.item_id("msg", at), answer.content))
    for call in answer.tool_calls:
        items.append(call_item(head.item_id("fc", len(items)), call))
    if items and not answer.tool_calls:
        items[-1]["status"] = status
    return items


def with_logprobs(items: Sequence[Item], logprobs: Sequence[Mapping[str, Any]]) -> list[Item]:
    """The items, the first text with the log-probs of all tokens of the answer: reasoning and
    calls were sampled, too, but have no place for them."""
    given = list(items)
    for at, item in enumerate(items):
        if item["type"] == "message":
            part = item["content"][0] | {"logprobs": list(logprobs)}
            given[at] = item | {"content": [part]}
            break
    return given


def reasoning_item(item_id: str, text: str | None, *, status: str = "completed") -> Item:
    content = [] if text is None else [reasoning_part(text)]
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": status,
    }


def message_item(
    item_id: str,
    text: str | None,
    *,
    status: str = "completed",
) -> Item:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [text_part(text)],
    }


def call_item(item_id: str, call: ToolCall, *, status: str = "completed") -> Item:
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
