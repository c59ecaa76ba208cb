"""The limit on rewards that an agent writes about itself.

A rollout may last for hours, and each event is a record that stays until its group is freed.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.errors import LimitReached
from forge.core.trajectory import TrajectoryName
from forge.v1 import common_pb2
from services.pool.storage.keys import reward_key, trajectory_key
from services.pool.storage.records import Records
from services.pool.storage.tables import Table


def check_agent_rewards(
    records: Records,
    name: TrajectoryName,
    rewards: Sequence[common_pb2.RewardEvent],
    *,
    most: int,
) -> None:
    """Raises `LimitReached` if the new ones of `rewards` exceed the limit; 0: no limit.

    A stored event id is not new.
    """
    trajectory = trajectory_key(name)
    new = {
        event.event_id
        for event in rewards
        if event.kind == common_pb2.REWARD_KIND_AGENT
        and records.get(Table.REWARDS, reward_key(trajectory, event.event_id)) is None
    }
    if not new or not most:
        return
    stored = sum(
        common_pb2.RewardEvent.FromString(bytes(payload)).kind == common_pb2.REWARD_KIND_AGENT
        for _, payload in records.scan(Table.REWARDS, prefix=trajectory)
    )
    if stored + len(new) > most:
        raise LimitReached(
            f"{name} has {stored} rewards of its agent; {len(new)} more exceed "
            f"max_agent_rewards = {most}"
        )
