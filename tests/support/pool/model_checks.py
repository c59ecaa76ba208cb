"""Rules that the model of a shard checks before it takes rewards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from forge.core.errors import AlreadyExists, InvalidArgument
from forge.v1.common_pb2 import REWARD_KIND_OUTCOME, RewardEvent


def check_one_outcome(stored: Mapping[str, RewardEvent], rewards: Sequence[RewardEvent]) -> None:
    """Raises AlreadyExists for a new outcome beside another one. `stored`: by event id."""
    after = {one.event_id: one for one in (*reversed(rewards), *stored.values())}
    new_outcome = any(
        one.kind == REWARD_KIND_OUTCOME and name not in stored for name, one in after.items()
    )
    if new_outcome and sum(one.kind == REWARD_KIND_OUTCOME for one in after.values()) > 1:
        raise AlreadyExists("refused")


def check_credits(rewards: Iterable[RewardEvent], turns: int) -> None:
    """Raises InvalidArgument for a reward of a turn that does not exist."""
    if any(event.turn_index >= turns for event in rewards):
        raise InvalidArgument("refused")
