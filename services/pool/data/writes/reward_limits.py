"""Limits on the rewards of one trajectory: one outcome, and so many that its agent writes.

A rollout may last for hours, and each event is a record that stays until its group is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forge.core.errors import AlreadyExists, LimitReached
from forge.core.trajectory import TrajectoryName
from forge.v1 import common_pb2
from services.pool.storage.keys import reward_key, trajectory_key
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

_OUTCOME, _AGENT = common_pb2.REWARD_KIND_OUTCOME, common_pb2.REWARD_KIND_AGENT


def check_rewards(
    records: Records,
    name: TrajectoryName,
    rewards: Sequence[common_pb2.RewardEvent],
    *,
    max_agent_rewards: int,
) -> None:
    """Raises `AlreadyExists` if a new one of `rewards` would be a second outcome, `LimitReached` if
    the new ones of the agent exceed the limit (0: no limit).

    A stored event id is not new. A trajectory of an earlier version may have several outcomes; it
    gets no further one.
    """
    trajectory = trajectory_key(name)
    limited = (_OUTCOME, _AGENT) if max_agent_rewards else (_OUTCOME,)
    firsts: dict[str, common_pb2.RewardEvent] = {}
    for event in rewards:
        firsts.setdefault(event.event_id, event)
    new = [
        event
        for event in firsts.values()
        if event.kind in limited
        and records.get(Table.REWARDS, reward_key(trajectory, event.event_id)) is None
    ]
    if not new:
        return
    stored = [
        common_pb2.RewardEvent.FromString(bytes(payload))
        for _, payload in records.scan(Table.REWARDS, prefix=trajectory)
    ]
    if outcomes := _of_kind(_OUTCOME, new):
        first, *others = _of_kind(_OUTCOME, stored) + outcomes
        if others:
            raise AlreadyExists(
                f"{name} has outcome {first.value:g} from event {first.event_id!r}; "
                f"{others[-1].value:g} from event {others[-1].event_id!r} would be a second one"
            )
    before, more = len(_of_kind(_AGENT, stored)), len(_of_kind(_AGENT, new))
    if more and before + more > max_agent_rewards:
        raise LimitReached(
            f"{name} has {before} rewards of its agent; {more} more exceed "
            f"max_agent_rewards = {max_agent_rewards}"
        )


def _of_kind(kind: int, events: Iterable[common_pb2.RewardEvent]) -> list[common_pb2.RewardEvent]:
    return [event for event in events if event.kind == kind]
