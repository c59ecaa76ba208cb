"""The rules by which commands change a shard: idempotence, fences, seals.

Each command is checked completely before its first write, so a refused command leaves no trace
although it shares a transaction with others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from forge.core.errors import (
    Conflict,
    FailedPrecondition,
    ForgeError,
    InvalidArgument,
    NotFound,
    StaleFence,
)
from forge.core.trajectory import TrajectoryName, sequence_lengths
from forge.v1 import common_pb2
from services.pool.data.closed_digests import (
    Mark,
    checked_rewards,
    is_compared,
    marks_of,
    with_rewards,
    with_turns,
)
from services.pool.data.commands import (
    AppendRewards,
    AppendTurns,
    Command,
    FollowLeader,
    FreeGroups,
    MarkOrphans,
    NewTurn,
    PutGroups,
    RepairUnit,
    SealTrajectory,
    SetGroupStates,
)
from services.pool.data.freeing import (
    check_not_freed,
    forget_orphan,
    free,
    intact_state,
    is_freed,
    put_state,
)
from services.pool.data.orphans import mark
from services.pool.data.record_repair import repair_from_replica
from services.pool.data.summaries import count_turns, header_of, rewards_of, summarize
from services.pool.storage.change_log import log_closed, log_rewarded
from services.pool.storage.group_index import (
    SETTLED_STATES,
    GroupMoves,
    after_late_seal,
    before_late_seal,
    enter_new,
)
from services.pool.storage.journal import follow
from services.pool.storage.keys import (
    group_key,
    index_of_turn_key,
    queue_key,
    reward_key,
    trajectory_key,
    turn_key,
)
from services.pool.storage.records import (
    DamagedRecord,
    Records,
    TrajectoryHeader,
    TurnHead,
    decode_turn_head,
    encode_header,
    encode_turn_head,
    turn_of_payload,
)
from services.pool.storage.tables import Table

_FENCE_KEY = b"fence"
_FENCE = struct.Struct(">Q")
_NAMED_TURNS = 8
"""Most missing turns that an error lists."""


def apply(command: Command, records: Records) -> Any:
    """Applies `command` in the transaction of `records`. Returns the answer, or the ForgeError that
    refused it, so that other commands of the transaction are still applied."""
    try:
        match command:
            case AppendTurns(turns=turns):
                return tuple(_attempt_turn(records, turn) for turn in turns)
            case AppendRewards():
                return _append_rewards(records, command)
            case SealTrajectory():
                return _seal(records, command)
            case PutGroups():
                return _put_groups(records, command)
            case SetGroupStates():
                return _set_group_states(records, command)
            case FreeGroups():
                return free(records, command)
            case MarkOrphans():
                return mark(records, command)
            case FollowLeader(steps=steps):
                return follow(records, steps)
            case RepairUnit():
                return repair_from_replica(records, command)
    except ForgeError as error:
        return error


def _attempt_turn(records: Records, turn: NewTurn) -> ForgeError | None:
    try:
        _append_turn(records, turn)
    except ForgeError as error:
        return error
    return None


def _append_turn(records: Records, turn: NewTurn) -> None:
    trajectory = trajectory_key(turn.trajectory)
    header = header_of(records, trajectory)
    check_not_freed(records, turn.trajectory, header)
    key = turn_key(trajectory, turn.head.turn_index)
    stored = records.get(Table.TURNS, key)
    if stored is not None:
        if not _same_turn(bytes(turn_of_payload(stored)), turn.serialized):
            raise Conflict(
                f"turn {turn.head.turn_index} of {turn.trajectory} is already stored with other "
                "content"
            )
        return
    if header is None:
        records.put(Table.TRAJECTORIES, trajectory, encode_header(TrajectoryHeader()))
    elif not header.is_open:
        raise FailedPrecondition(
            f"{turn.trajectory} is {_state_name(header.state)} and takes no turn "
            f"{turn.head.turn_index}"
        )
    records.put(Table.TURNS, key, encode_turn_head(turn.head), turn.serialized)


def _same_turn(stored: bytes, sent: bytes) -> bool:
    # Another library may order the fields of the same turn differently.
    return stored == sent or common_pb2.Turn.FromString(stored) == common_pb2.Turn.FromString(sent)


def _append_rewards(records: Records, command: AppendRewards) -> None:
    trajectory = trajectory_key(command.trajectory)
    header = header_of(records, trajectory)
    check_not_freed(records, command.trajectory, header)
    if header is None:
        header = TrajectoryHeader()
        records.put(Table.TRAJECTORIES, trajectory, encode_header(header))
    elif header.state == common_pb2.TRAJECTORY_STATE_SEALED:
        _check_credits(command.trajectory, command.rewards, turns=header.turns)
    _put_rewards(records, trajectory, header, command.rewards)


def _put_rewards(
    records: Records,
    trajectory: bytes,
    header: TrajectoryHeader,
    rewards: Sequence[common_pb2.RewardEvent],
) -> None:
    """Adds the new ones of `rewards`; `header` is the trajectory's before.

    Raises `DataLoss` before the first write if a reward of a closed trajectory is lost: a new
    digest would hide that.
    """
    new: dict[bytes, bytes] = {}
    for reward in rewards:
        key = reward_key(trajectory, reward.event_id)
        if key not in new and records.get(Table.REWARDS, key) is None:
            new[key] = reward.SerializeToString()
    if new and not header.is_open:
        checked_rewards(records, trajectory, header)
    for key, serialized in new.items():
        records.put(Table.REWARDS, key, serialized)
    if new and not header.is_open:
        if is_compared(header):
            marks = marks_of(records, Table.REWARDS, trajectory)
            header = with_rewards(header, marks)
        header = log_rewarded(records, trajectory, header)
        records.put(Table.TRAJECTORIES, trajectory, encode_header(header))


def _check_credits(
    name: TrajectoryName, rewards: Iterable[common_pb2.RewardEvent], *, turns: int
) -> None:
    for reward in rewards:
        if reward.turn_index >= turns:
            raise InvalidArgument(
                f"reward {reward.event_id} credits turn_index {reward.turn_index}, but {name} has "
                f"{turns} turns"
            )


def _seal(records: Records, command: SealTrajectory) -> common_pb2.TrajectorySummary:
    trajectory = trajectory_key(command.trajectory)
    header = header_of(records, trajectory)
    if header is None or not _same_seal(command, header):
        check_not_freed(records, command.trajectory, header)
    header = header or TrajectoryHeader()
    sealing = command.state == common_pb2.TRAJECTORY_STATE_SEALED
    if sealing:
        _check_credits(command.trajectory, command.rewards, turns=command.turns)
    if not header.is_open:
        _check_same_seal(command, header)
        if not header.freed:
            _put_rewards(records, trajectory, header, command.rewards)
    else:
        _close(records, command, trajectory, header)
    summary = summarize(records, command.trajectory)
    assert summary is not None
    return summary


def _close(
    records: Records, command: SealTrajectory, trajectory: bytes, header: TrajectoryHeader
) -> None:
    # Reading every turn back is on purpose: nothing is sealed that could not be trained on.
    heads: list[TurnHead] = []
    marks: list[Mark] = []
    size_bytes = 0
    for key, checksum, payload in records.scan_stored(Table.TURNS, prefix=trajectory):
        heads.append(decode_turn_head(index_of_turn_key(key), payload))
        marks.append((key, checksum))
        size_bytes += len(payload)
    stored = rewards_of(records, trajectory, header)
    if command.state == common_pb2.TRAJECTORY_STATE_SEALED:
        _check_complete(command, heads)
        # What came before the seal could credit any turn.
        _check_credits(command.trajectory, stored, turns=command.turns)
    task_id = command.trajectory.task_id
    settled = before_late_seal(records, task_id, past_damage=command.past_damage)
    closed = TrajectoryHeader(
        state=command.state,
        domain=command.domain,
        sealed_unix_s=command.sealed_unix_s,
        reason=command.reason,
        turn_bytes=size_bytes,
        closing_agent_s=command.closing_agent_s,
    )
    closed = with_turns(count_turns(closed, heads), marks)
    _put_rewards(records, trajectory, header, command.rewards)
    closed = with_rewards(closed, marks_of(records, Table.REWARDS, trajectory))
    closed = log_closed(records, trajectory, closed)
    records.put(Table.TRAJECTORIES, trajectory, encode_header(closed))
    after_late_seal(records, settled)


def _check_same_seal(command: SealTrajectory, header: TrajectoryHeader) -> None:
    if not _same_seal(command, header):
        raise FailedPrecondition(
            f"{command.trajectory} is {_state_name(header.state)} with {header.turns} turns and "
            f"cannot become {_state_name(command.state)} with {command.turns}"
        )


def _same_seal(command: SealTrajectory, header: TrajectoryHeader) -> bool:
    sealed = command.state == common_pb2.TRAJECTORY_STATE_SEALED
    return header.state == command.state and not (sealed and header.turns != command.turns)


def _check_complete(command: SealTrajectory, heads: Sequence[TurnHead]) -> None:
    stored = {head.turn_index for head in heads}
    missing = [index for index in range(command.turns) if index not in stored]
    if missing:
        shown = ", ".join(map(str, missing[:_NAMED_TURNS]))
        more = ", ..." if len(missing) > _NAMED_TURNS else ""
        raise FailedPrecondition(
            f"{command.trajectory} lacks {len(missing)} of its {command.turns} turns: {shown}{more}"
        )
    if len(heads) > command.turns:
        raise FailedPrecondition(
            f"{command.trajectory} has {len(heads)} turns stored, more than the {command.turns} "
            "it is to be sealed with"
        )
    try:
        sequence_lengths(heads)
    except InvalidArgument as error:
        raise InvalidArgument(f"{command.trajectory}: {error}") from None


def _put_groups(records: Records, command: PutGroups) -> None:
    _check_fence(records, command.fence)
    for group in command.groups:
        key = group_key(group.task.task_id)
        if records.has(Table.GROUPS, key):
            continue
        forget_orphan(records, group.task.task_id)
        records.put(Table.GROUPS, key, group.SerializeToString())
        pending = common_pb2.GroupRecord(state=common_pb2.GROUP_STATE_PENDING)
        records.put(Table.STATES, key, pending.SerializeToString())
        place = queue_key(group.task.purpose, group.queue_index, group.task.task_id)
        records.put(Table.QUEUE, place, b"")
        enter_new(records, group)
    _raise_fence(records, command.fence)


def _set_group_states(records: Records, command: SetGroupStates) -> None:
    _check_fence(records, command.fence)
    new = {
        task_id: state
        for task_id, state in command.states.items()
        if _is_new_state(records, task_id, state, past_damage=command.past_damage)
    }
    moves = GroupMoves(records)
    for task_id, state in new.items():
        put_state(records, task_id, state, moves, now_unix_s=command.now_unix_s)
    moves.store()
    _raise_fence(records, command.fence)


def _is_new_state(
    records: Records, task_id: str, state: common_pb2.GroupRecord, *, past_damage: bool
) -> bool:
    """False for the state that a freed group has. Raises `FailedPrecondition` for another, and
    `DamagedRecord` for a group that cannot be read, unless `past_damage`."""
    key = group_key(task_id)
    if not records.has(Table.GROUPS, key):
        raise NotFound(f"group {task_id} is not on this shard")
    stored = intact_state(records, task_id)
    if not past_damage:
        if stored is None:
            message = f"the state of group {task_id} is damaged or lost"
            raise DamagedRecord(message, table=Table.STATES, key=key)
        records.get(Table.GROUPS, key)  # Raises.
    if stored is None:
        if is_freed(records, task_id) and state.state not in SETTLED_STATES:
            raise FailedPrecondition(f"group {task_id} was freed, in a state that is damaged")
        return True
    if not stored.freed_unix_s:
        return True
    if (stored.state, stored.batch_id, stored.step) != (state.state, state.batch_id, state.step):
        was = common_pb2.GroupState.Name(stored.state).removeprefix("GROUP_STATE_").lower()
        raise FailedPrecondition(
            f"group {task_id} was freed after it was {was}"
            + (f" in step {stored.step}, which a checkpoint covers" if stored.step else "")
        )
    return False


def fence_of(records: Records) -> int:
    """The highest fence seen; 0 before the first."""
    stored = records.get(Table.META, _FENCE_KEY)
    return 0 if stored is None else int(_FENCE.unpack(stored)[0])


def _check_fence(records: Records, fence: int) -> None:
    newest = fence_of(records)
    if fence < newest:
        raise StaleFence(f"fence {fence} is stale: a leader with fence {newest} has written")


def _raise_fence(records: Records, fence: int) -> None:
    if fence > fence_of(records):
        records.put(Table.META, _FENCE_KEY, _FENCE.pack(fence))


def _state_name(state: int) -> str:
    name = common_pb2.TrajectoryState.Name(common_pb2.TrajectoryState.ValueType(state))
    return name.removeprefix("TRAJECTORY_STATE_").lower()
