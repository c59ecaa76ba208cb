"""Turns that a later call can name, for protocols that leave the conversation to the server.

Owns the names given out in one session and what is known of their turns. Owns no message: those
are read off the tree of contexts. Handles are part of the turn's record, so they live as long as
the session does, in whichever gateway; one of another session is not known here. That a name was
taken back is kept beside the turns, which never change, as a reward of nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge.core.conversation.context_tree import Node
from forge.v1 import common_pb2
from services.gateway.model.chat_model import Tools

_DELETED = "deleted-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A name for a turn that is yet to be sampled."""

    name: str
    """Unguessable, and unique over all sessions."""
    facts: Mapping[str, Any]
    """What its protocol wants to be told again: JSON, and small, as it is kept with the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The turn of a handle, as far as it is not in the tree of contexts."""

    turn_index: int
    facts: Mapping[str, Any]
    finish_reason: common_pb2.FinishReason.ValueType
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """A turn found again."""

    held: Held
    node: Node
    """Its answer in the tree of contexts, behind the messages of its request."""
    tools: Tools
    prompt_tokens: int
    sampled_ids: bytes


def deletion(name: str) -> common_pb2.RewardEvent:
    """On record, it makes `name` unknown to every later reader of the session."""
    return common_pb2.RewardEvent(
        event_id=_DELETED + name,
        name="response_deleted",
        kind=common_pb2.REWARD_KIND_PROCESS,
        turn_index=-1,
    )


def deleted_names(rewards: Iterable[common_pb2.RewardEvent]) -> Iterator[str]:
    """The names whose `deletion` is on record."""
    for reward in rewards:
        if reward.event_id.startswith(_DELETED):
            yield reward.event_id.removeprefix(_DELETED)
