"""Rollouts of a batch as rows of a table, for trackers of experiments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

from forge.client.reward_events import reward_sum
from forge.client.stored.conversations import conversations
from forge.core.conversation.messages import to_openai
from forge.core.errors import ForgeError
from forge.v1 import common_pb2 as pb

MOST_CHARACTERS = 20_000
"""Most characters of the conversation of one row; its beginning is left out."""


class LoggedRollout(NamedTuple):
    """One row; the fields are its columns."""

    trajectory_id: str
    domain: str
    reward: float
    """Sum of the outcomes."""
    components: str
    """Rewards by name, as JSON."""
    turns: int
    conversation: str
    """The messages before and with the last answer, as JSON; "" without any on record."""


def logged_rollouts(
    groups: Sequence[Sequence[pb.Trajectory]], most: int
) -> tuple[LoggedRollout, ...]:
    """Returns up to `most` rows: the first rollout of each group, then the second ones."""
    places = logged_places([len(group) for group in groups], most)
    return tuple(logged_row(groups[group][place]) for group, place in places)


def logged_places(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Group and place in it of each logged rollout, in order; `sizes` are those of the groups."""
    by_rank = zip_longest(
        *([(group, at) for at in range(size)] for group, size in enumerate(sizes))
    )
    chosen = (one for rank in by_rank for one in rank if one is not None)
    return list(islice(chosen, most))


def logged_row(one: pb.Trajectory) -> LoggedRollout:
    """The row of a trajectory."""
    return LoggedRollout(
        trajectory_id=one.trajectory_id,
        domain=one.domain,
        reward=reward_sum(one.rewards) or 0.0,
        components=json.dumps({each.name: each.value for each in one.rewards}),
        turns=len(one.turns),
        conversation=_conversation(one.turns),
    )


def _conversation(turns: Sequence[pb.Turn]) -> str:
    try:
        found, _ = conversations(turns)
    except ForgeError:
        return ""
    if not found:
        return ""
    messages = [to_openai(message) for message in found[-1].messages]
    text = json.dumps(messages, ensure_ascii=False)[-MOST_CHARACTERS:]
    # Half of a surrogate pair, which an agent can send, is no text: a tracker would drop the row.
    return text.encode(errors="replace").decode()
