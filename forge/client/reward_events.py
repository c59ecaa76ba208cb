"""Reward components on the wire: their kinds, how one is made, what one means to the credit rules.

Imports no channel. The rules themselves are in `forge.core.credit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forge.core.credit.rewards import RewardComponent, RewardKind
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2 as pb

REWARD_KINDS: Mapping[int, RewardKind] = {
    pb.REWARD_KIND_OUTCOME: "outcome",
    pb.REWARD_KIND_PROCESS: "process",
    pb.REWARD_KIND_SPEED: "speed",
    pb.REWARD_KIND_AGENT: "agent",
}
"""The name of each kind, by its number."""
_NUMBERS = {kind: pb.RewardKind.ValueType(number) for number, kind in REWARD_KINDS.items()}


def reward_event(
    name: str, value: float, *, kind: RewardKind = "outcome", turn_index: int = -1, key: str = ""
) -> pb.RewardEvent:
    """Return a reward component; `key` distinguishes several with one name and turn."""
    return pb.RewardEvent(
        event_id=f"{kind}-{name}-{turn_index}{key and '-'}{key}",
        name=name,
        kind=_NUMBERS[kind],
        value=value,
        turn_index=turn_index,
    )


def reward_component(event: pb.RewardEvent) -> RewardComponent:
    """Return a component for the credit rules. Raises `InvalidArgument` for an unknown kind."""
    if event.kind not in REWARD_KINDS:
        raise InvalidArgument(f"reward {event.event_id!r} has kind {event.kind}")
    kind = REWARD_KINDS[event.kind]
    return RewardComponent(kind=kind, value=event.value, turn_index=event.turn_index)


def reward_sum(rewards: Iterable[pb.RewardEvent], name: str = "") -> float | None:
    """Return the sum of the rewards with a name, without one of the outcomes; None if there is
    none."""
    values = [
        each.value
        for each in rewards
        if (each.name == name if name else each.kind == pb.REWARD_KIND_OUTCOME)
    ]
    return sum(values) if values else None
