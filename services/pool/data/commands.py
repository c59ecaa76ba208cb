"""What may be asked of the writer: one frozen dataclass per change to a shard.

Owns the shape of checked changes; `validation` makes them out of what came over the wire,
`apply` applies them. Everything in here has been validated by itself; what depends on the
records already stored has not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from forge.core.trajectory import TrajectoryName
from forge.v1 import common_pb2, replica_pb2
from services.pool.storage.records import TurnHead
from services.pool.storage.tables import Key

if TYPE_CHECKING:
    from services.pool.storage.record_copies import CopiedRecords


class NewTurn(NamedTuple):
    """One turn on its way to the disk."""

    trajectory: TrajectoryName
    head: TurnHead
    serialized: bytes
    """The Turn as it arrived; stored, and given out again, byte for byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendTurns:
    """Answered by one entry per turn: None once it is on disk, or the ForgeError it met."""

    turns: tuple[NewTurn, ...]

    @property
    def cost_bytes(self) -> int:
        return sum(len(turn.serialized) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRewards:
    trajectory: TrajectoryName
    rewards: tuple[common_pb2.RewardEvent, ...]

    @property
    def cost_bytes(self) -> int:
        return sum(reward.ByteSize() for reward in self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealTrajectory:
    """Answered by the TrajectorySummary."""

    trajectory: TrajectoryName
    domain: str
    turns: int
    """How many turns there must be; an abandoned trajectory is taken as it is."""
    rewards: tuple[common_pb2.RewardEvent, ...]
    state: int
    """SEALED or ABANDONED."""
    reason: str
    sealed_unix_s: float
    closing_agent_s: float | None = None
    past_damage: bool = False
    """A damaged group does not stop it: no replica has that."""

    @property
    def cost_bytes(self) -> int:
        return sum(reward.ByteSize() for reward in self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutGroups:
    groups: tuple[common_pb2.GroupRecord, ...]
    fence: int
    """Revision of the writer's leadership."""

    @property
    def cost_bytes(self) -> int:
        return sum(group.ByteSize() for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGroupStates:
    states: dict[str, common_pb2.GroupRecord] = field(default_factory=dict)
    """By task id: a GroupRecord with state, batch, step and reason alone."""
    fence: int
    now_unix_s: float
    past_damage: bool = False
    """A damaged state is replaced: no replica has it."""

    @property
    def cost_bytes(self) -> int:
        return sum(state.ByteSize() for state in self.states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeGroups:
    """Answered by `freeing.Freed`. Groups that may not be freed any more are passed over."""

    task_ids: tuple[str, ...]
    covered_step: int
    """What this step and those before it trained is in a checkpoint."""
    max_records: int
    """Turns and rewards that may be deleted in one transaction."""
    max_bytes: int = 8 << 20
    """After that many bytes of them it ends, too."""
    now_unix_s: float

    @property
    def cost_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkOrphans:
    """Answered by how many tasks were given up: those that have a group by now are passed over."""

    task_ids: tuple[str, ...]
    now_unix_s: float

    @property
    def cost_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLeader:
    """What a leader sent, in order. Answered by the position reached, 0 while still copying."""

    steps: tuple[replica_pb2.FollowStep, ...]

    @property
    def cost_bytes(self) -> int:
        return sum(step.ByteSize() for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairUnit:
    """Answered by whether the unit is whole then."""

    unit: Key
    copy: CopiedRecords
    since: int
    """Newest commit here before the copy was read."""
    leads: bool
    """The repair is a commit that the follower takes; a follower becomes as its leader is."""

    @property
    def cost_bytes(self) -> int:
        return sum(map(len, self.copy.values.values()))


Command = (
    AppendTurns
    | AppendRewards
    | SealTrajectory
    | PutGroups
    | SetGroupStates
    | FreeGroups
    | MarkOrphans
    | FollowLeader
    | RepairUnit
)
