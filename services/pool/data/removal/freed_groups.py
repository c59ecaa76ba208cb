"""Freeing of groups: which records go, and which stay.

    turns, rewards    go
    trajectories      stay: state, counts, versions, and the sum of their outcomes
    groups            stay, without the task's payload if a digest stands for it
    states, queue     stay: counters are made from them

Frees a bounded number of records per transaction. The first transaction marks the group and its
trajectories: from then on they are neither read nor appended to. `retention` chooses groups; that
only settled ones are freed, and trained ones only below a checkpoint, is checked here, in the
transaction that frees.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from forge.core.errors import DataLoss, FailedPrecondition
from forge.core.trajectory import TrajectoryName
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.pool.data.commands import FreeGroups
from services.pool.data.group_digest import group_digest
from services.pool.data.summaries import count_turns, rewards_of, turns_of
from services.pool.metrics import REPAIRS
from services.pool.storage.change_log import delete_changes
from services.pool.storage.erasures import is_erased
from services.pool.storage.groups.group_index import SETTLED_STATES, StateMoves
from services.pool.storage.groups.group_records import group_record, group_state, intact_state
from services.pool.storage.groups.settled_index import index_settled, remove_settled, settled_key
from services.pool.storage.keys import group_key, task_prefix
from services.pool.storage.records import (
    Deletions,
    Records,
    TrajectoryHeader,
    decode_header,
    encode_header,
    intact_header,
)
from services.pool.storage.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """The result of one transaction."""

    groups: int = 0
    """Groups with no records left to free."""
    records: int = 0
    payload_bytes: int = 0
    unfinished: bool = False
    """There was more to free than the transaction may hold."""


def put_state(
    records: Records,
    task_id: str,
    state: common_pb2.GroupRecord,
    moves: StateMoves,
    *,
    now_unix_s: float,
) -> None:
    """Replaces the state of a group, damaged or not, and keeps the indexes; the caller stores
    `moves`. A group that is settled already keeps its time, unless its old state is damaged.
    """
    before = intact_state(records, task_id)
    after = common_pb2.GroupRecord()
    after.CopyFrom(state)
    if before is None:
        log.error("group_state_overwritten", task_id=task_id, step=state.step)
        REPAIRS.labels("overwritten").inc()
        after.freed_unix_s = now_unix_s if is_freed(records, task_id) else 0.0
    remove_settled(records, task_id, before)
    if after.state in SETTLED_STATES:
        settled_unix_s = before.settled_unix_s if before is not None else 0.0
        after.settled_unix_s = settled_unix_s or now_unix_s
        index_settled(records, task_id, after)
    records.put(Table.STATES, group_key(task_id), after.SerializeToString())
    moves.moved(task_id, before, after)


def forget_orphan(records: Records, task_id: str) -> None:
    """Removes the orphan's index entry once its group arrives; freed records stay freed."""
    if records.has(Table.STATES, group_key(task_id)):
        remove_settled(records, task_id, intact_state(records, task_id))


def is_freed(records: Records, task_id: str) -> bool:
    """True if a group was freed, by its state or, if that is damaged, by its trajectories."""
    state = intact_state(records, task_id)
    if state is not None:
        return bool(state.freed_unix_s)
    for key, value in records.scan_checksummed(Table.TRAJECTORIES, prefix=task_prefix(task_id)):
        header = intact_header(key, value)
        if header is not None and header.freed:
            return True
    return False


def check_not_freed(
    records: Records, name: TrajectoryName, header: TrajectoryHeader | None
) -> None:
    """Raises `FailedPrecondition` if trajectory `name` was freed, or would be a new one of a freed
    group; `header` is its stored header."""
    if header is not None:
        if header.freed:
            raise FailedPrecondition(f"{name} was freed: {_final_state(records, name.task_id)}")
        return
    if is_freed(records, name.task_id):
        raise FailedPrecondition(
            f"group {name.task_id} was freed, so {name} cannot begin: "
            f"{_final_state(records, name.task_id)}"
        )


def free(records: Records, command: FreeGroups) -> Freed:
    """Frees groups of `command`, up to one of its limits."""
    deletions = Deletions(limit=command.max_records)
    groups = payload_bytes = 0
    for task_id in command.task_ids:
        try:
            if not _begin(records, task_id, command):
                continue
            records.delete_content(task_prefix(task_id), deletions)
            if deletions.full:
                break
            payload_bytes += _finish(records, task_id)
        except DataLoss as error:
            # A damaged group is skipped.
            log.error("group_not_freed", task_id=task_id, error=str(error))
            continue
        groups += 1
    return Freed(
        groups=groups,
        records=deletions.counts.total(),
        payload_bytes=payload_bytes + deletions.size_bytes,
        unfinished=deletions.full,
    )


def _begin(records: Records, task_id: str, command: FreeGroups) -> bool:
    """Marks a group that may be freed, and its trajectories; whether it was marked.

    Raises `DataLoss` before the first mark.
    """
    state = group_state(records, task_id)
    if state is None or not _may_be_freed(state, command.covered_step):
        return False
    if records.get(Table.SETTLED, settled_key(state.settled_unix_s, task_id)) is None:
        return False
    if not state.freed_unix_s:
        if command.digests is not None and (
            group_digest(records, task_id) != command.digests.get(task_id)
        ):
            return False
        for key, header in _marked_trajectories(records, task_id):
            delete_changes(records, header)
            freed = msgspec.structs.replace(header, closed_change=0, rewarded_change=0)
            records.put(Table.TRAJECTORIES, key, encode_header(freed))
        state.freed_unix_s = command.now_unix_s
        records.put(Table.STATES, group_key(task_id), state.SerializeToString())
    return True


def _may_be_freed(state: common_pb2.GroupRecord, covered_step: int) -> bool:
    # A rewind since the choice makes the group pending again.
    if state.state == common_pb2.GROUP_STATE_TRAINED:
        return bool(state.freed_unix_s) or state.step <= covered_step
    return state.state in SETTLED_STATES


def _marked_trajectories(records: Records, task_id: str) -> list[tuple[bytes, TrajectoryHeader]]:
    """Keys and headers of the trajectories to free, final except for the change log."""
    marked = []
    for key, payload in records.scan(Table.TRAJECTORIES, prefix=task_prefix(task_id)):
        header = decode_header(payload)
        if header.freed:
            # Freed as an orphan: its outcome is counted already.
            continue
        if header.is_open:
            # Its group is settled, so it will never be closed.
            header = count_turns(header, [head for head, _ in turns_of(records, key)])
            header = msgspec.structs.replace(
                header,
                state=common_pb2.TRAJECTORY_STATE_ABANDONED,
                reason="its group was settled without it",
            )
        outcome = _outcome(records, key, header)
        marked.append((key, msgspec.structs.replace(header, freed=True, outcome=outcome)))
    return marked


def _outcome(records: Records, trajectory: bytes, header: TrajectoryHeader) -> float | None:
    outcomes = [
        event.value
        for event in rewards_of(records, trajectory, header)
        if event.kind == common_pb2.REWARD_KIND_OUTCOME
    ]
    return sum(outcomes) if outcomes else None


def _finish(records: Records, task_id: str) -> int:
    """Drops the payload of a group and its place in the index; the bytes freed."""
    state = group_state(records, task_id)
    assert state is not None
    freed_bytes = _drop_payload(records, task_id)
    records.delete(Table.SETTLED, settled_key(state.settled_unix_s, task_id))
    return freed_bytes


def _drop_payload(records: Records, task_id: str) -> int:
    """The bytes freed. A payload without a digest stays: it identifies the task."""
    group = group_record(records, task_id)
    if group is None or not group.task_digest or not group.task.payload_json:
        return 0
    freed_bytes = len(group.task.payload_json.encode())
    group.task.payload_json = ""
    # LMDB joins pages that have become empty when a record goes, not when one gets smaller.
    records.delete(Table.GROUPS, group_key(task_id))
    records.put(Table.GROUPS, group_key(task_id), group.SerializeToString())
    return freed_bytes


def _final_state(records: Records, task_id: str) -> str:
    if is_erased(records, task_id):
        return "an operator erased its group"
    state = intact_state(records, task_id)
    if state is not None and state.state == common_pb2.GROUP_STATE_TRAINED:
        return f"a checkpoint covers step {state.step}, which trained its group"
    if not records.has(Table.GROUPS, group_key(task_id)):
        return "its group never came"
    return "its group was settled long ago"
