"""What a shard must hold, as plain dictionaries: the rules of docs/pool.md in their simplest form.

Owns no file. `apply` does to the model what `PoolStore.commit` does to the disk and says what must
be answered; the properties are what must be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forge.core.errors import Conflict, FailedPrecondition, ForgeError, NotFound, StaleFence
from forge.core.queue.groups import FREED
from forge.core.trajectory import TrajectoryName, sequence_lengths
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import (
    AppendRewards,
    AppendTurns,
    Command,
    FreeGroups,
    MarkOrphans,
    NewTurn,
    PutGroups,
    SealTrajectory,
    SetGroupStates,
)
from services.pool.data.removal.freed_groups import Freed
from services.pool.data.removal.orphans import ORPHAN_REASON
from services.pool.storage.change_log import ChangeKind
from tests.support.pool.model_checks import check_credits, check_one_outcome

OPEN = common_pb2.TRAJECTORY_STATE_OPEN
SEALED = common_pb2.TRAJECTORY_STATE_SEALED
ABANDONED = common_pb2.TRAJECTORY_STATE_ABANDONED
OUTCOME = common_pb2.REWARD_KIND_OUTCOME
PENDING = common_pb2.GROUP_STATE_PENDING
TRAINED = common_pb2.GROUP_STATE_TRAINED
TOMBSTONED = common_pb2.GROUP_STATE_TOMBSTONED
_IDENTITY = ("state", "batch_id", "step")
SETTLED = (TRAINED, TOMBSTONED, common_pb2.GROUP_STATE_EVALUATED)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    turns: dict[int, NewTurn] = field(default_factory=dict)
    rewards: dict[str, common_pb2.RewardEvent] = field(default_factory=dict)
    state: int = OPEN
    domain: str = ""
    reason: str = ""
    closed_unix_s: float = 0.0
    remains: common_pb2.TrajectorySummary | None = None
    """Of a freed one; its turns and rewards are those that are not deleted yet."""


@dataclass(slots=True, kw_only=True)
class Group:
    """State of a task; `record` is None for one that was given up without a group."""

    record: common_pb2.GroupRecord | None
    state: int = PENDING
    batch_id: str = ""
    step: int = 0
    reason: str = ""
    settled_unix_s: float = 0.0
    freed_unix_s: float = 0.0
    indexed: bool = False
    """Something of it can be freed."""


class PoolModel:
    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.trajectories: dict[TrajectoryName, Trajectory] = {}
        self.changes: list[tuple[ChangeKind, TrajectoryName]] = []
        self.fence = 0

    # What is written

    def apply(self, command: Command) -> Any:
        """The answer, or the class of the error; of turns, one for each."""
        try:
            match command:
                case AppendTurns(turns=turns):
                    return tuple(self._outcome(turn) for turn in turns)
                case AppendRewards():
                    return self._append_rewards(command)
                case SealTrajectory():
                    return self._seal(command)
                case PutGroups():
                    return self._put_groups(command)
                case SetGroupStates():
                    return self._set_states(command)
                case FreeGroups():
                    return self._free(command)
                case MarkOrphans():
                    return self._mark(command)
        except ForgeError as error:
            return type(error)
        raise AssertionError(command)

    def _outcome(self, turn: NewTurn) -> type[ForgeError] | None:
        try:
            self._append(turn)
        except ForgeError as error:
            return type(error)
        return None

    def _append(self, turn: NewTurn) -> None:
        trajectory = self._touched(turn.trajectory)
        stored = trajectory.turns.get(turn.head.turn_index)
        if stored is not None:
            if stored != turn:
                raise Conflict("refused")
            return
        if trajectory.state != OPEN:
            raise FailedPrecondition("refused")
        trajectory.turns[turn.head.turn_index] = turn
        self.trajectories[turn.trajectory] = trajectory

    def _touched(self, name: TrajectoryName) -> Trajectory:
        """The one stored, or one to be stored; refused when it is freed or its group is."""
        trajectory = self.trajectories.get(name)
        group = self.groups.get(name.task_id)
        if trajectory is None and group is not None and group.freed_unix_s:
            raise FailedPrecondition("refused")
        if trajectory is not None and trajectory.remains is not None:
            raise FailedPrecondition("refused")
        return trajectory or Trajectory()

    def _append_rewards(self, command: AppendRewards) -> None:
        trajectory = self._touched(command.trajectory)
        check_one_outcome(trajectory.rewards, command.rewards)
        if trajectory.state == SEALED:
            check_credits(command.rewards, len(trajectory.turns))
        self.trajectories[command.trajectory] = trajectory
        self._reward(command.trajectory, command.rewards, late=trajectory.state != OPEN)

    def _reward(
        self, name: TrajectoryName, rewards: tuple[common_pb2.RewardEvent, ...], *, late: bool
    ) -> None:
        stored = self.trajectories[name].rewards
        new = {event.event_id: event for event in reversed(rewards) if event.event_id not in stored}
        stored.update(new)
        if new and late:
            rewarded = (ChangeKind.REWARDED, name)
            self.changes = [change for change in self.changes if change != rewarded]
            self.changes.append(rewarded)

    def _seal(self, command: SealTrajectory) -> common_pb2.TrajectorySummary:
        name, sealing = command.trajectory, command.state == SEALED
        trajectory = self.trajectories.get(name)
        if trajectory is None or not self._closed_so(trajectory, command):
            trajectory = self._touched(name)
        if trajectory.remains is None:
            check_one_outcome(trajectory.rewards, command.rewards)
        if sealing:
            check_credits(command.rewards, command.turns)
        if trajectory.state != OPEN:
            if not self._closed_so(trajectory, command):
                raise FailedPrecondition("refused")
            if trajectory.remains is None:
                self._reward(name, command.rewards, late=True)
            return self.summary(name)
        if sealing:
            if sorted(trajectory.turns) != list(range(command.turns)):
                raise FailedPrecondition("refused")
            sequence_lengths([turn.head for _, turn in sorted(trajectory.turns.items())])
            check_credits(trajectory.rewards.values(), command.turns)
        trajectory.state, trajectory.domain = command.state, command.domain
        trajectory.reason, trajectory.closed_unix_s = command.reason, command.sealed_unix_s
        self.trajectories[name] = trajectory
        self.changes.append((ChangeKind.CLOSED, name))
        self._reward(name, command.rewards, late=False)
        return self.summary(name)

    def _closed_so(self, trajectory: Trajectory, command: SealTrajectory) -> bool:
        was = trajectory.remains
        turns = len(trajectory.turns) if was is None else was.turns
        state = trajectory.state
        return state == command.state and (state != SEALED or turns == command.turns)

    def _put_groups(self, command: PutGroups) -> None:
        self._check_fence(command.fence)
        for record in command.groups:
            group = self.groups.get(record.task.task_id)
            if group is None or group.record is None:
                self.groups[record.task.task_id] = Group(record=record)
        self.fence = command.fence

    def _set_states(self, command: SetGroupStates) -> list[str]:
        self._check_fence(command.fence)
        new: list[tuple[Group, common_pb2.GroupRecord]] = []
        freed: list[str] = []
        for task_id, state in command.states.items():
            group = self.groups.get(task_id)
            if group is None or group.record is None:
                raise NotFound("refused")
            if not group.freed_unix_s:
                new.append((group, state))
            elif command.tombstone_freed and state.state == PENDING:
                freed.append(task_id)
            elif any(getattr(group, name) != getattr(state, name) for name in _IDENTITY):
                raise FailedPrecondition("refused")
        for group, state in new:
            group.state, group.batch_id = state.state, state.batch_id
            group.step, group.reason = state.step, state.reason
            group.indexed = state.state in SETTLED
            settled_unix_s = group.settled_unix_s or command.now_unix_s
            group.settled_unix_s = settled_unix_s if group.indexed else 0.0
        for task_id in freed:
            group = self.groups[task_id]  # Records may be left to free: `indexed` stays.
            group.state, group.batch_id, group.step, group.reason = TOMBSTONED, "", 0, FREED
        self.fence = command.fence
        return freed

    def _check_fence(self, fence: int) -> None:
        if fence < self.fence:
            raise StaleFence("refused")

    def _mark(self, command: MarkOrphans) -> int:
        unknown = [task_id for task_id in command.task_ids if task_id not in self.groups]
        for task_id in unknown:
            self.groups[task_id] = Group(
                record=None,
                state=TOMBSTONED,
                reason=ORPHAN_REASON,
                settled_unix_s=command.now_unix_s,
                indexed=True,
            )
        return len(unknown)

    def _free(self, command: FreeGroups) -> Freed:
        left, groups = command.max_records, 0
        for task_id in command.task_ids:
            group = self.groups.get(task_id)
            if group is None or not self._may_be_freed(group, command.covered_step):
                continue
            if not group.freed_unix_s:
                self._mark_freed(task_id)
                group.freed_unix_s = command.now_unix_s
            left -= self._delete(task_id, left)
            if left <= 0:
                break
            group.indexed = False
            groups += 1
        return Freed(groups=groups, records=command.max_records - left, unfinished=left <= 0)

    def _may_be_freed(self, group: Group, covered_step: int) -> bool:
        uncovered = group.state == TRAINED and group.step > covered_step
        return group.indexed and (bool(group.freed_unix_s) or not uncovered)

    def _mark_freed(self, task_id: str) -> None:
        for name, trajectory in self._of(task_id):
            if trajectory.remains is not None:
                continue
            if trajectory.state == OPEN:
                trajectory.state = ABANDONED
                trajectory.reason = "its group was settled without it"
            self.changes = [change for change in self.changes if change[1] != name]
            remains = self.summary(name)
            remains.freed = True
            outcomes = [one.value for one in remains.rewards if one.kind == OUTCOME]
            del remains.rewards[:]
            if outcomes:
                remains.rewards.add(
                    event_id="outcome",
                    name="outcome",
                    kind=OUTCOME,
                    value=sum(outcomes),
                    turn_index=-1,
                )
            trajectory.remains = remains

    def _delete(self, task_id: str, limit: int) -> int:
        """Turns first, then rewards, in the order of their keys."""
        found = [trajectory for _, trajectory in self._of(task_id)]
        records: list[tuple[dict[Any, Any], Any]] = [
            (trajectory.turns, index) for trajectory in found for index in sorted(trajectory.turns)
        ]
        records += [
            (trajectory.rewards, event_id)
            for trajectory in found
            for event_id in sorted(trajectory.rewards)
        ]
        for owner, key in records[:limit]:
            del owner[key]
        return len(records[:limit])

    def _of(self, task_id: str) -> list[tuple[TrajectoryName, Trajectory]]:
        """In the order of their keys."""
        found = [(name, one) for name, one in self.trajectories.items() if name.task_id == task_id]
        return sorted(found, key=lambda each: (each[0].rollout_index, each[0].attempt))

    # What is read

    def summary(self, name: TrajectoryName) -> common_pb2.TrajectorySummary:
        trajectory = self.trajectories[name]
        if trajectory.remains is not None:
            return trajectory.remains
        heads = [turn.head for turn in trajectory.turns.values()]
        sampled = [head for head in heads if head.sampled_tokens]
        return common_pb2.TrajectorySummary(
            trajectory_id=name.trajectory_id,
            task_id=name.task_id,
            state=common_pb2.TrajectoryState.ValueType(trajectory.state),
            turns=len(heads),
            sampled_tokens=sum(head.sampled_tokens for head in heads),
            prompt_tokens=sum(head.prompt_tokens for head in heads),
            rewards=_ordered(trajectory.rewards),
            min_weight_version=min((head.min_weight_version for head in sampled), default=-1),
            max_weight_version=max((head.max_weight_version for head in sampled), default=-1),
            sealed_unix_s=trajectory.closed_unix_s,
            reason=trajectory.reason,
            domain=trajectory.domain,
        )

    def content(self, name: TrajectoryName) -> common_pb2.Trajectory | None:
        """None for one that cannot be fetched."""
        trajectory = self.trajectories.get(name)
        if trajectory is None or trajectory.remains is not None:
            return None
        turns = [turn.serialized for _, turn in sorted(trajectory.turns.items())]
        return common_pb2.Trajectory(
            trajectory_id=name.trajectory_id,
            task_id=name.task_id,
            domain=trajectory.domain,
            state=common_pb2.TrajectoryState.ValueType(trajectory.state),
            reason=trajectory.reason,
            sealed_unix_s=trajectory.closed_unix_s,
            turns=map(common_pb2.Turn.FromString, turns),
            rewards=_ordered(trajectory.rewards),
        )

    def queue(self) -> list[pool_pb2.ScanGroupsResponse]:
        """In the order of the queue, each with its trajectories."""
        stored = [
            (group.record.queue_index, task_id, group)
            for task_id, group in self.groups.items()
            if group.record is not None
        ]
        return [
            pool_pb2.ScanGroupsResponse(
                group=_scanned(group),
                trajectories=[self.summary(name) for name, _ in self._of(task_id)],
            )
            for _, task_id, group in sorted(stored, key=lambda each: each[:2])
        ]

    def settled(self) -> list[tuple[float, str, int, bool]]:
        """Time, task, step and whether there is no group."""
        return sorted(
            (group.settled_unix_s, task_id, group.step, group.record is None)
            for task_id, group in self.groups.items()
            if group.indexed
        )

    def settled_counts(self) -> dict[tuple[int, int, str, str], tuple[int, int]]:
        """Groups and sealed rollouts by purpose, state, domain and reason."""
        found: dict[tuple[int, int, str, str], tuple[int, int]] = {}
        for task_id, group in self.groups.items():
            if group.record is None or group.state not in SETTLED:
                continue
            task = group.record.task
            sealed = {
                name.rollout_index
                for name, one in self._of(task_id)
                if one.state == SEALED and name.rollout_index < task.group_size
            }
            key = (task.purpose, group.state, task.domain, "")
            groups, rollouts = found.get(key, (0, 0))
            trains = task.purpose == common_pb2.PURPOSE_TRAIN
            found[key] = (groups + 1, rollouts + (len(sealed) if trains else 0))
        return found

    def orphans(self) -> list[str]:
        """Tasks that are not given up yet."""
        return sorted({name.task_id for name in self.trajectories} - self.groups.keys())


def _ordered(rewards: dict[str, common_pb2.RewardEvent]) -> list[common_pb2.RewardEvent]:
    return [event for _, event in sorted(rewards.items())]


def _scanned(group: Group) -> common_pb2.GroupRecord:
    assert group.record is not None
    whole = common_pb2.GroupRecord(
        state=common_pb2.GroupState.ValueType(group.state),
        batch_id=group.batch_id,
        step=group.step,
        reason=group.reason,
        settled_unix_s=group.settled_unix_s,
        freed_unix_s=group.freed_unix_s,
    )
    whole.MergeFrom(group.record)
    return whole
