"""Stores groups and their states, under the fence of the newest scheduler.

Each command is checked completely before its first write, so a refused one leaves no trace although
it shares a transaction with others.
"""

from __future__ import annotations

import struct

from forge.core.enum_words import enum_word
from forge.core.errors import FailedPrecondition, NotFound, StaleFence, Unavailable
from forge.core.queue.groups import FREED
from forge.v1 import common_pb2
from services.pool.data.commands import PutGroups, SetGroupStates
from services.pool.data.removal.freed_groups import forget_orphan, is_freed, put_state
from services.pool.storage.erasures import is_erased
from services.pool.storage.groups.group_index import SETTLED_STATES, StateMoves, enter_new
from services.pool.storage.groups.group_records import intact_state
from services.pool.storage.groups.moved_groups import check_not_moved
from services.pool.storage.groups.settled_index import remove_settled, settled_key
from services.pool.storage.keys import group_key, queue_key
from services.pool.storage.records import DamagedRecord, Records
from services.pool.storage.tables import Table

_FENCE_KEY = b"fence"
_TERM_KEY = b"term"
_NUMBER = struct.Struct(">Q")


def put_groups(records: Records, command: PutGroups) -> None:
    """Stores new groups as pending; known ones stay as they are. Raises StaleFence."""
    check_fence(records, command.fence)
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
    raise_fence(records, command.fence)


def set_group_states(records: Records, command: SetGroupStates) -> list[str]:
    """Replaces states of groups; the tasks that `tombstone_freed` applies to. Raises StaleFence, or
    an error of the first wrong group."""
    check_fence(records, command.fence)
    freed = _tombstones_of_freed(records, command)
    new = freed | {
        task_id: state
        for task_id, state in command.states.items()
        if task_id not in freed
        and _is_new_state(records, task_id, state, past_damage=command.past_damage)
    }
    # A half-freed group stays in the index until its last record is deleted.
    finished = [task_id for task_id in freed if not _is_half_freed(records, task_id)]
    moves = StateMoves(records)
    for task_id, state in new.items():
        put_state(records, task_id, state, moves, now_unix_s=command.now_unix_s)
    for task_id in finished:
        remove_settled(records, task_id, intact_state(records, task_id))
    moves.store()
    raise_fence(records, command.fence)
    _raise(records, _TERM_KEY, command.term)
    return list(freed)


def _tombstones_of_freed(
    records: Records, command: SetGroupStates
) -> dict[str, common_pb2.GroupRecord]:
    found: dict[str, common_pb2.GroupRecord] = {}
    for task_id, state in command.states.items():
        if not command.tombstone_freed or state.state != common_pb2.GROUP_STATE_PENDING:
            continue
        if not records.has(Table.GROUPS, group_key(task_id)):
            continue  # An orphan has a state only; `_is_new_state` refuses it.
        stored = intact_state(records, task_id)
        if stored is not None and stored.freed_unix_s and not is_erased(records, task_id):
            _check_not_moved(records, task_id)
            found[task_id] = common_pb2.GroupRecord(
                state=common_pb2.GROUP_STATE_TOMBSTONED,
                reason=FREED,
                freed_unix_s=stored.freed_unix_s,
            )
    return found


def _check_not_moved(records: Records, task_id: str) -> None:
    """Raises `Unavailable` for a group that moved away: the leader sends its state to the other
    shard next."""
    try:
        check_not_moved(records, task_id)
    except FailedPrecondition as error:
        raise Unavailable(str(error)) from None


def _is_half_freed(records: Records, task_id: str) -> bool:
    """Whether a freed group has records left to free."""
    state = intact_state(records, task_id)
    assert state is not None
    return records.has(Table.SETTLED, settled_key(state.settled_unix_s, task_id))


def _is_new_state(
    records: Records, task_id: str, state: common_pb2.GroupRecord, *, past_damage: bool
) -> bool:
    """False for the state that a freed group has, and for an erased group. Raises
    `FailedPrecondition` for another state of a freed group, `Unavailable` for one that moved, and
    `DamagedRecord` for a group that cannot be read, unless `past_damage`."""
    key = group_key(task_id)
    if not records.has(Table.GROUPS, key):
        raise NotFound(f"group {task_id} is not on this shard")
    _check_not_moved(records, task_id)
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
    if is_erased(records, task_id):
        return False
    if (stored.state, stored.batch_id, stored.step) != (state.state, state.batch_id, state.step):
        was = enum_word(common_pb2.GroupState, stored.state)
        raise FailedPrecondition(
            f"group {task_id} was freed after it was {was}"
            + (f" in step {stored.step}, which a checkpoint covers" if stored.step else "")
        )
    return False


def fence_of(records: Records) -> int:
    """The highest fence seen; 0 before the first."""
    return _number(records, _FENCE_KEY)


def term_of(records: Records) -> int:
    """The highest number of a scheduler's term seen; 0 before the first."""
    return _number(records, _TERM_KEY)


def check_fence(records: Records, fence: int) -> None:
    """Raises StaleFence if a later leader has written."""
    newest = fence_of(records)
    if fence < newest:
        raise StaleFence(f"fence {fence} is stale: a leader with fence {newest} has written")


def raise_fence(records: Records, fence: int) -> None:
    """Refuses earlier leaders from now on."""
    _raise(records, _FENCE_KEY, fence)


def _number(records: Records, key: bytes) -> int:
    stored = records.get(Table.META, key)
    return 0 if stored is None else int(_NUMBER.unpack(stored)[0])


def _raise(records: Records, key: bytes, number: int) -> None:
    if number > _number(records, key):
        records.put(Table.META, key, _NUMBER.pack(number))
