"""Stores rewards, and seals trajectories: the rules of their turns, credits and digests.

Each command is checked completely before its first write, so a refused one leaves no trace although
it shares a transaction with others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forge.core.errors import FailedPrecondition, InvalidArgument
from forge.core.trajectory import TrajectoryName, sequence_lengths
from forge.v1 import common_pb2
from services.pool.data.closed_digests import (
    Mark,
    checked_rewards,
    is_compared,
    listed,
    marks_of,
    with_rewards,
    with_turns,
)
from services.pool.data.commands import AppendRewards, SealTrajectory
from services.pool.data.removal.freed_groups import check_not_freed
from services.pool.data.summaries import (
    count_turns,
    header_of,
    rewards_of,
    state_name,
    summarize,
)
from services.pool.data.writes.reward_limits import check_rewards
from services.pool.storage.change_log import log_closed, log_rewarded
from services.pool.storage.groups.group_index import after_late_seal, before_late_seal
from services.pool.storage.groups.moved_groups import check_not_moved
from services.pool.storage.keys import index_of_turn_key, reward_key, trajectory_key
from services.pool.storage.records import (
    Records,
    TrajectoryHeader,
    TurnHead,
    decode_turn_head,
    encode_header,
)
from services.pool.storage.tables import Table


def append_rewards(records: Records, command: AppendRewards) -> None:
    """Adds rewards to a trajectory, closed or not. Raises if it was freed or moved."""
    trajectory = trajectory_key(command.trajectory)
    check_not_moved(records, command.trajectory.task_id)
    header = header_of(records, trajectory)
    check_not_freed(records, command.trajectory, header)
    check_rewards(
        records,
        command.trajectory,
        command.rewards,
        max_agent_rewards=command.max_agent_rewards,
    )
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


def seal(records: Records, command: SealTrajectory) -> common_pb2.TrajectorySummary:
    """Closes a trajectory with its last rewards; repeated, only adds rewards."""
    trajectory = trajectory_key(command.trajectory)
    check_not_moved(records, command.trajectory.task_id)
    header = header_of(records, trajectory)
    if header is None or not _same_seal(command, header):
        check_not_freed(records, command.trajectory, header)
    header = header or TrajectoryHeader()
    if not header.freed:
        check_rewards(
            records,
            command.trajectory,
            command.rewards,
            max_agent_rewards=command.max_agent_rewards,
        )
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
            f"{command.trajectory} is {state_name(header.state)} with {header.turns} turns and "
            f"cannot become {state_name(command.state)} with {command.turns}"
        )


def _same_seal(command: SealTrajectory, header: TrajectoryHeader) -> bool:
    sealed = command.state == common_pb2.TRAJECTORY_STATE_SEALED
    return header.state == command.state and not (sealed and header.turns != command.turns)


def _check_complete(command: SealTrajectory, heads: Sequence[TurnHead]) -> None:
    stored = {head.turn_index for head in heads}
    missing = [index for index in range(command.turns) if index not in stored]
    if missing:
        raise FailedPrecondition(
            f"{command.trajectory} lacks {len(missing)} of its {command.turns} turns: "
            f"{listed(map(str, missing))}"
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
