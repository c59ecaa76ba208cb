"""OpenAI's response objects and output items.

Owns the split of an answer into items, and the ids that `history` joins them by.
`events` owns the order of events.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.core.conversation.messages import Message, ToolCall
from forge.v1 import common_pb2
from services.gateway.http.openai.responses.tools import ToolName, ToolNames, input_of

_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
_ITEM_ID = re.compile(r"(?:msg|rs|fc|ctc|ctr)_([0-9a-f]{32})_\d+")

CUSTOM, RAW_CUSTOM = "ctc", "ctr"
"""Id prefixes of the call of a custom tool; of one whose arguments are not its one text."""

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
"""The fields of a response to a request without options."""

Item = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields of a response that are equal in all its events."""

    key: str
    """32 hex digits in the ids of the response and its items."""
    created_at: float
    """Unix time, seconds."""
    model: str
    instructions: str | None
    tools: Sequence[Mapping[str, Any]]
    """Tools in the format of the Responses API."""
    names: ToolNames = field(default_factory=dict)
    echoed: Mapping[str, Any]
    """Fields of the request that the response repeats."""

    @property
    def response_id(self) -> str:
        """Id of the response."""
        return f"resp_{self.key}"

    def item_id(self, kind: str, at: int) -> str:
        """Returns the id of the output item at `at`; `kind` is its prefix."""
        return f"{kind}_{self.key}_{at}"

    def response(self, status: str, output: Sequence[Item], **changes: Any) -> dict[str, Any]:
        """Returns the response object in its current state."""
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
    """Returns the key in a response id; "" for an id of another API."""
    match = _RESPONSE_ID.fullmatch(response_id)
    return match[1] if match else ""


def key_of_item(item_id: str | None) -> str | None:
    """Returns the key of an item's response; None if the id has no key."""
    match = _ITEM_ID.fullmatch(item_id or "")
    return match[1] if match else None


def ending(finish_reason: common_pb2.FinishReason.ValueType) -> tuple[str, dict[str, Any]]:
    """Returns the status of a response, and the fields that give its reason."""
    if finish_reason == common_pb2.FINISH_REASON_LENGTH:
        return "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
    return "completed", {}


def usage(
    *, prompt_tokens: int, cached_tokens: int, sampled_tokens: int, reasoning_tokens: int
) -> dict[str, Any]:
    """Returns the usage in the format of the Responses API."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + sampled_tokens,
    }


def output_of(head: Head, answer: Message, status: str) -> list[Item]:
    """Returns the items of an answer; if it is incomplete, its last text is incomplete."""
    items: list[Item] = []
    if answer.reasoning:
        items.append(reasoning_item(head.item_id("rs", 0), answer.reasoning))
    if answer.content or (status == "completed" and not answer.tool_calls):
        # Agents expect a message item, also in an empty answer.
        at = len(items)
        items.append(message_item(head.item_id("msg", at), answer.content))
    for call in answer.tool_calls:
        items.append(call_item(head, len(items), call))
    if items and not answer.tool_calls:
        items[-1]["status"] = status
    return items


def with_logprobs(items: Sequence[Item], logprobs: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Adds the log-probs of all tokens to the first text item. They include the tokens of reasoning
    and calls, because those items have no field for log-probs."""
    result = list(items)
    for at, item in enumerate(items):
        if item["type"] == "message":
            part = item["content"][0] | {"logprobs": list(logprobs)}
            result[at] = item | {"content": [part]}
            break
    return result


def reasoning_item(item_id: str, text: str | None, *, status: str = "completed") -> Item:
    """Returns a `reasoning` item."""
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
    """Returns a `message` item."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [text_part(text)],
    }


def call_item(head: Head, at: int, call: ToolCall, *, status: str = "completed") -> Item:
    """Returns a `function_call` item, or a `custom_tool_call` of a custom tool; both without their
    text unless `status` is completed."""
    tool = head.names.get(call.name, ToolName(name=call.name))
    kind, key, text = "fc", "arguments", call.arguments
    if tool.custom:
        key, given = "input", input_of(call.arguments)
        kind, text = (RAW_CUSTOM, call.arguments) if given is None else (CUSTOM, given)
    item = {
        "id": head.item_id(kind, at),
        "type": "custom_tool_call" if tool.custom else "function_call",
        "call_id": call.call_id,
        "name": tool.name,
        key: text if status == "completed" else "",
        "status": status,
    }
    return item | ({"namespace": tool.namespace} if tool.namespace else {})


def reasoning_part(text: str) -> dict[str, Any]:
    """Returns a content part of a `reasoning` item."""
    return {"type": "reasoning_text", "text": text}


def text_part(text: str) -> dict[str, Any]:
    """Returns a content part of a `message` item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
