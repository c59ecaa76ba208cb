"""The rule that a trajectory has at most one outcome."""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.errors import AlreadyExists
from forge.core.trajectory import TrajectoryName
from forge.v1 import common_pb2
from services.pool.storage.keys import reward_key, trajectory_key
from services.pool.storage.records import Records
from services.pool.storage.tables import Table


def check_one_outcome(
    records: Records, name: TrajectoryName, rewards: Sequence[common_pb2.RewardEvent]
) -> None:
    """Raises `AlreadyExists` if a new one of `rewards` would be a second outcome.

    A stored event id is not new. A trajectory of an earlier version may have several outcomes; it
    gets no further one.
    """
    trajectory = trajectory_key(name)
    firsts: dict[str, common_pb2.RewardEvent] = {}
    for event in rewards:
        firsts.setdefault(event.event_id, event)
    new = [
        event
        for event in filter(_is_outcome, firsts.values())
        if records.get(Table.REWARDS, reward_key(trajectory, event.event_id)) is None
    ]
    if not new:
        return
    stored = (
        common_pb2.RewardEvent.FromString(bytes(payload))
        for _, payload in records.scan(Table.REWARDS, prefix=trajectory)
    )
    first, *others = [*filter(_is_outcome, stored), *new]
    if others:
        raise AlreadyExists(
            f"{name} has outcome {first.value:g} from event {first.event_id!r}; "
            f"{others[-1].value:g} from event {others[-1].event_id!r} would be a second one"
        )


def _is_outcome(event: common_pb2.RewardEvent) -> bool:
    return event.kind == common_pb2.REWARD_KIND_OUTCOME
