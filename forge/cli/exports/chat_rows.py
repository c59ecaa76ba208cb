"""Rows of chat messages: conversations for SFT, and pairs of them for preference training.

Owns the columns, in the form that TRL's trainers and OpenAI's fine-tuning read:

    messages                   list of role, content, tool_calls, ...: a conversation
    prompt, chosen, rejected   of a pair: the common beginning, and two ways to continue it
    tools                      list of function definitions
    chat_template_kwargs       variables of the chat template

In JSON Lines keys without a value are absent, and the arguments of calls are objects, as chat
templates need them, or texts, as OpenAI's API does. In Parquet, whose columns have one type, they
are texts of JSON, and so are `tools` and `chat_template_kwargs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge.cli.exports.files import Arrow
from forge.client.stored.conversations import StoredConversation
from forge.core.conversation.messages import Message, same, to_openai

Arguments = Literal["object", "text"]
"""Form of call arguments in JSON Lines."""
_TEXTS = ("role", "content", "reasoning_content", "tool_call_id", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRow:
    """One row of conversations."""

    chats: Mapping[str, Sequence[Message]]
    """By column."""
    tools: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any]
    facts: Mapping[str, str | int | float | None]
    """The other columns, with the same types in every row."""


def sft_row(
    talk: StoredConversation, *, trajectory_id: str, domain: str, reward: float | None
) -> ChatRow:
    """Returns the row of a conversation."""
    return ChatRow(
        chats={"messages": talk.messages},
        tools=talk.tools,
        template_kwargs=talk.template_kwargs,
        facts={
            "trajectory_id": trajectory_id,
            "task_id": trajectory_id.partition(":")[0],
            "domain": domain,
            "turn_index": talk.turn_index,
            "reward": reward,
        },
    )


def preference_row(
    chosen: StoredConversation, rejected: StoredConversation, *, facts: Mapping[str, str | float]
) -> ChatRow | None:
    """Returns the row of a pair; None if the two are equal, have no common prompt after which the
    policy answers, or have other tools or template variables."""
    if chosen.tools != rejected.tools or chosen.template_kwargs != rejected.template_kwargs:
        return None
    split = _split(chosen, rejected)
    if not split:
        return None
    return ChatRow(
        chats={
            "prompt": chosen.messages[:split],
            "chosen": chosen.messages[split:],
            "rejected": rejected.messages[split:],
        },
        tools=chosen.tools,
        template_kwargs=chosen.template_kwargs,
        facts=facts,
    )


def _split(left: StoredConversation, right: StoredConversation) -> int:
    """Messages of the longest common prompt; 0 without one, and for equal conversations."""
    split = 0
    for ours, theirs in zip(left.messages, right.messages, strict=False):
        if not same(ours, theirs):
            break
        split += 1
    if split == len(left.messages) == len(right.messages):
        return 0
    both = left.answers & right.answers
    while split and split not in both:
        split -= 1
    return split


class ChatRows:
    """The columns of conversations, see the top of the file."""

    def __init__(self, chats: Sequence[str], facts: Mapping[str, str], arguments: Arguments):
        """`facts`: pyarrow's name of the type of each other column."""
        self._chats = chats
        self._facts = facts
        self._arguments = arguments

    def size_bytes(self, row: ChatRow, /) -> int:
        """Returns the characters of the messages, about."""
        texts = [
            len(one.content)
            + len(one.reasoning)
            + sum(len(call.arguments) for call in one.tool_calls)
            for chat in row.chats.values()
            for one in chat
        ]
        return sum(texts) + 100 * len(texts)

    def json_row(self, row: ChatRow, /) -> dict[str, Any]:
        """Returns one row as plain data."""
        chats = {
            name: [_message(one, self._arguments) for one in chat]
            for name, chat in row.chats.items()
        }
        # Always there: TRL unpacks it.
        kwargs = {"chat_template_kwargs": dict(row.template_kwargs)}
        return chats | ({"tools": list(row.tools)} if row.tools else {}) | kwargs | dict(row.facts)

    def table(self, arrow: Arrow, rows: Sequence[ChatRow], /) -> Any:
        """Returns rows as a table."""
        text = arrow.pa.string()
        columns = {
            name: arrow.lists(
                [len(row.chats[name]) for row in rows],
                _message_column(arrow, [one for row in rows for one in row.chats[name]]),
            )
            for name in self._chats
        }
        plain = [
            {
                "tools": json.dumps(row.tools) if row.tools else None,
                "chat_template_kwargs": json.dumps(row.template_kwargs),
            }
            for row in rows
        ]
        columns |= arrow.plain(plain, dict.fromkeys(("tools", "chat_template_kwargs"), text))
        kinds = {name: getattr(arrow.pa, kind)() for name, kind in self._facts.items()}
        return arrow.pa.table(columns | arrow.plain([dict(row.facts) for row in rows], kinds))


def sft_rows(arguments: Arguments) -> ChatRows:
    """Returns the columns of conversations."""
    texts = dict.fromkeys(("trajectory_id", "task_id", "domain"), "string")
    return ChatRows(["messages"], texts | {"turn_index": "int32", "reward": "float64"}, arguments)


def preference_rows(arguments: Arguments) -> ChatRows:
    """Returns the columns of pairs."""
    texts = dict.fromkeys(("task_id", "domain", "chosen_id", "rejected_id"), "string")
    numbers = dict.fromkeys(("chosen_reward", "rejected_reward", "margin"), "float64")
    return ChatRows(["prompt", "chosen", "rejected"], texts | numbers, arguments)


def _message(message: Message, arguments: Arguments) -> dict[str, Any]:
    plain = to_openai(message)
    # The content has the text that stands for an image.
    plain.pop("images", None)
    if arguments == "object":
        for call in plain.get("tool_calls", ()):
            call["function"]["arguments"] = _object_or_text(call["function"]["arguments"])
    return plain


def _object_or_text(arguments: str) -> Any:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _message_column(arrow: Arrow, messages: Sequence[Message]) -> Any:
    text = arrow.pa.string()
    plain = [_message(one, "text") for one in messages]
    columns = {name: arrow.pa.array([one.get(name) for one in plain], text) for name in _TEXTS}
    function = arrow.pa.struct([("name", text), ("arguments", text)])
    call = arrow.pa.struct([("id", text), ("type", text), ("function", function)])
    columns["tool_calls"] = arrow.pa.array(
        [one.get("tool_calls") for one in plain], arrow.pa.list_(call)
    )
    return arrow.pa.StructArray.from_arrays(list(columns.values()), list(columns))
