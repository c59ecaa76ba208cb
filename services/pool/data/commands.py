"""Commands to the writer: one frozen dataclass per change of a shard.

`validation` makes them from requests, `store` applies them. Each is valid by itself; its relation
to stored records is not checked yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from forge.core.trajectory import TrajectoryName
from forge.v1 import common_pb2, replica_pb2
from services.pool.storage.records import TurnHead
from services.pool.storage.tables import Key

if TYPE_CHECKING:
    from services.pool.storage.record_copies import CopiedRecords


class NewTurn(NamedTuple):
    """One turn to store."""

    trajectory: TrajectoryName
    head: TurnHead
    serialized: bytes
    """The Turn as it arrived; stored and returned byte for byte."""
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendTurns:
    """Answered by one entry per turn: None once it is on disk, or its ForgeError."""

    turns: tuple[NewTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRewards:
    """Adds rewards to a trajectory."""

    trajectory: TrajectoryName
    rewards: tuple[common_pb2.RewardEvent, ...]
    max_agent_rewards: int = 0
    """Most rewards of kind AGENT of the trajectory; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealTrajectory:
    """Answered by the TrajectorySummary."""

    trajectory: TrajectoryName
    domain: str
    turns: int
    """Required number of turns; any number for an abandoned trajectory."""
    rewards: tuple[common_pb2.RewardEvent, ...]
    state: int
    """SEALED or ABANDONED."""
    reason: str
    sealed_unix_s: float
    closing_agent_s: float | None = None
    max_agent_rewards: int = 0
    """The same field as in `AppendRewards`."""
    past_damage: bool = False
    """Seals although the group is damaged: no replica has it intact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutGroups:
    """Stores new groups; known ones stay as they are."""

    groups: tuple[common_pb2.GroupRecord, ...]
    fence: int
    """Revision of the writer's leadership."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGroupStates:
    """Replaces states of groups."""

    states: dict[str, common_pb2.GroupRecord] = field(default_factory=dict)
    """GroupRecords with only state, batch, step and reason, by task id."""
    fence: int
    term: int = 0
    tombstone_freed: bool = False
    """Freed groups that become pending become tombstoned; answered by their task ids."""
    now_unix_s: float
    past_damage: bool = False
    """Replaces damaged states: no replica has them intact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeGroups:
    """Answered by `freed_groups.Freed`. Groups that may no longer be freed are skipped."""

    task_ids: tuple[str, ...]
    covered_step: int
    """Groups trained at or before this step are in a checkpoint."""
    max_records: int
    """Turns and rewards that may be deleted in one transaction."""
    now_unix_s: float
    digests: Mapping[str, bytes] | None = None
    """By task: groups with another digest are skipped; None: all are freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkOrphans:
    """Answered by the number of tasks tombstoned; tasks that have a state by now are skipped."""

    task_ids: tuple[str, ...]
    now_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EraseTasks:
    """Answered by `task_erasure.Erased`."""

    task_ids: tuple[str, ...]
    max_records: int
    """Turns and rewards that may be deleted in one transaction."""
    now_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteErasures:
    """Stores entries of the ledger of erasures that are applied."""

    entries: Mapping[str, bytes]
    """By id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkMoved:
    """Answered by the tasks whose groups are moved to the target."""

    digests: dict[str, bytes]
    """`group_digest` of each task, as exported."""
    target: str
    fence: int
    now_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardCopy:
    """Deletes a copy of a group. Answered by whether anything is left."""

    task_id: str
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecords:
    """Turns and rewards of a group from another shard, as they lie on disk."""

    values: tuple[tuple[Key, bytes], ...]
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportGroup:
    """The rest of a group from another shard."""

    task_id: str
    values: tuple[tuple[Key, bytes], ...]
    """Record, state and trajectory headers, as they lie on disk."""
    staged: int
    """Turns and rewards that were staged."""
    erased: bool
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLeader:
    """Steps from a leader, in order. Answered by the position reached, 0 while copying."""

    steps: tuple[replica_pb2.FollowStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairUnit:
    """Answered by whether the unit is whole then."""

    unit: Key
    copy: CopiedRecords
    since: int
    """Newest commit here before the copy was read."""
    leads: bool
    """True on a leader: followers get the repair as a commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MendIndex:
    """Stores or deletes index entries, as the records of their groups have them. Answered by the
    number of changes."""

    entries: tuple[Key, ...]


Command = (
    AppendTurns
    | AppendRewards
    | SealTrajectory
    | PutGroups
    | SetGroupStates
    | FreeGroups
    | MarkOrphans
    | EraseTasks
    | NoteErasures
    | MarkMoved
    | DiscardCopy
    | StageRecords
    | ImportGroup
    | FollowLeader
    | RepairUnit
    | MendIndex
)


def cost_bytes(command: Command) -> int:
    """Bytes of payload."""
    match command:
        case AppendTurns(turns=turns):
            return sum(len(turn.serialized) for turn in turns)
        case AppendRewards(rewards=messages) | SealTrajectory(rewards=messages):
            return sum(message.ByteSize() for message in messages)
        case PutGroups(groups=messages) | FollowLeader(steps=messages):
            return sum(message.ByteSize() for message in messages)
        case SetGroupStates(states=states):
            return sum(state.ByteSize() for state in states.values())
        case RepairUnit(copy=copy):
            return sum(map(len, copy.values.values()))
        case StageRecords(values=values) | ImportGroup(values=values):
            return sum(len(value) for _, value in values)
        case _:
            return 0
