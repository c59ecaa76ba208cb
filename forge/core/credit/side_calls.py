"""Side calls among the turns of a trajectory: titles, summaries for a screen, probes of the model.

Rewards say nothing about them, so they are left out of training by default. Owns the rule.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, Protocol

SideCall = Literal["excluded", "side_call"]
"""Reason why a turn is left out: its agent says so, or the rule does."""
LINE_CHARS = 16
"""Shortest line that shows that a later request has an answer."""


class RecordedTurn(Protocol):
    """The part of a recorded turn that the rule reads; `forge.v1.Turn` has it."""

    parent_turn: int
    """Turn that this one extends, or -1."""
    prefix_tokens: int
    """Tokens shared with the parent's sequence."""
    offers_tools: bool
    system_digest: bytes
    """Names the system prompt; empty without one."""
    messages_json: str
    """The new messages of the request and the answer; "" if they are not on record."""
    train: bool
    """Label by the agent, if there is one."""

    def HasField(self, field_name: Literal["train"], /) -> bool:  # noqa: N802
        """Whether the agent has said so."""


def side_calls(turns: Sequence[RecordedTurn], contexts: Sequence[int]) -> dict[int, SideCall]:
    """Side calls by turn index; `contexts` are the tokens of each sequence before its answer.

    By the rule, a side call offers no tools where other turns offer some, has a system prompt of
    none of those, and no later turn continues its answer or has a line of it, as the turns after a
    summary do. A label of the agent decides first.
    """
    continued = {
        turn.parent_turn
        for turn in turns
        if turn.parent_turn >= 0 and turn.prefix_tokens > contexts[turn.parent_turn]
    }
    systems = {turn.system_digest for turn in turns if turn.offers_tools}
    found: dict[int, SideCall] = {}
    for index, turn in enumerate(turns):
        if turn.HasField("train"):
            if not turn.train:
                found[index] = "excluded"
        elif (
            systems
            and not turn.offers_tools
            and turn.system_digest not in systems
            and index not in continued
            and not _is_retold(turns, index)
        ):
            found[index] = "side_call"
    return found


def _is_retold(turns: Sequence[RecordedTurn], index: int) -> bool:
    """Whether a later request has a line of an answer that the answer's own request has not."""
    own = _record(turns[index])
    asked = _text(own.get("messages", ()))
    lines = [line.strip() for line in _text([own.get("answer") or {}]).splitlines()]
    said = [line for line in lines if len(line) >= LINE_CHARS and line not in asked]
    if not said:
        return False
    later = (_text(_record(turn).get("messages", ())) for turn in turns[index + 1 :])
    return any(line in text for text in later for line in said)


def _record(turn: RecordedTurn) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(turn.messages_json) if turn.messages_json else {}
    return record


def _text(messages: Sequence[dict[str, Any]]) -> str:
    contents = (message.get("content") for message in messages)
    return "\n".join(text for text in contents if isinstance(text, str))
