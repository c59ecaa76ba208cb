"""Stores the turns of open trajectories; a repeated turn changes nothing.

Each turn is checked completely before its first write, so a refused one leaves no trace although it
shares a transaction with others.
"""

from __future__ import annotations

from collections.abc import Iterable

from forge.core.errors import Conflict, FailedPrecondition, ForgeError
from forge.v1 import common_pb2
from services.pool.data.commands import NewTurn
from services.pool.data.removal.freed_groups import check_not_freed
from services.pool.data.summaries import header_of, state_name
from services.pool.storage.groups.moved_groups import check_not_moved
from services.pool.storage.keys import trajectory_key, turn_key
from services.pool.storage.records import (
    Records,
    TrajectoryHeader,
    encode_header,
    encode_turn_head,
    turn_of_payload,
)
from services.pool.storage.tables import Table


def store_turns(records: Records, turns: Iterable[NewTurn]) -> tuple[ForgeError | None, ...]:
    """The answer to each turn: None, or the error that refuses it."""
    return tuple(_attempt_turn(records, turn) for turn in turns)


def _attempt_turn(records: Records, turn: NewTurn) -> ForgeError | None:
    try:
        _append_turn(records, turn)
    except ForgeError as error:
        return error
    return None


def _append_turn(records: Records, turn: NewTurn) -> None:
    trajectory = trajectory_key(turn.trajectory)
    check_not_moved(records, turn.trajectory.task_id)
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
            f"{turn.trajectory} is {state_name(header.state)} and takes no turn "
            f"{turn.head.turn_index}"
        )
    records.put(Table.TURNS, key, encode_turn_head(turn.head), turn.serialized)


def _same_turn(stored: bytes, sent: bytes) -> bool:
    # Another library may order the fields of the same turn differently.
    return stored == sent or common_pb2.Turn.FromString(stored) == common_pb2.Turn.FromString(sent)
