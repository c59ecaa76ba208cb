"""Names of turns, for protocols in which a request names an earlier response.

Owns the names of one session and the facts of their turns. Owns no messages: the context tree has
them. A handle is part of the turn's record, so it lives as long as the session, in any gateway, and
is unknown in other sessions. Turns never change, so the deletion of a name is recorded beside them,
as a reward with the value 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge.core.conversation.context_tree import Node
from forge.core.token_columns import TOKEN_BYTES
from forge.v1 import common_pb2
from services.gateway.model.chat_model import Tools

_DELETED = "deleted-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """The name of a turn, given before the turn is sampled."""

    name: str
    """Unguessable, and unique over all sessions."""
    facts: Mapping[str, Any]
    """JSON that the protocol needs again; small, because the turn's record contains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTurn:
    """The facts of a named turn that the context tree does not have."""

    turn_index: int
    facts: Mapping[str, Any]
    finish_reason: common_pb2.FinishReason.ValueType
    cached_tokens: int
    of_other: Recalled | None = None
    """The turn of another model, whose context is outside of the session's tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A named turn with its context."""

    turn: NamedTurn
    node: Node
    """The turn's answer in the context tree, after the messages of its request."""
    tools: Tools
    prompt_tokens: int
    sampled_ids: bytes
    """b"" for a turn of another model."""
    other_tokens: int = 0
    """Length of the answer of another model."""

    @property
    def sampled_tokens(self) -> int:
        """Length of the answer."""
        return self.other_tokens or len(self.sampled_ids) // TOKEN_BYTES


def deletion(name: str) -> common_pb2.RewardEvent:
    """Returns the reward event that deletes `name` for every later reader of the session."""
    return common_pb2.RewardEvent(
        event_id=_DELETED + name,
        name="response_deleted",
        kind=common_pb2.REWARD_KIND_PROCESS,
        turn_index=-1,
    )


def deleted_names(rewards: Iterable[common_pb2.RewardEvent]) -> Iterator[str]:
    """Yields the names with a `deletion` on record."""
    for reward in rewards:
        if reward.event_id.startswith(_DELETED):
            yield reward.event_id.removeprefix(_DELETED)
