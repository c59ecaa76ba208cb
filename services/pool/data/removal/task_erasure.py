"""Erasure of tasks: no stored record keeps a prompt, an answer, a reward, a tag or a user of them.

    turns, rewards, trajectories   go
    groups                         stay, without payload, tag, user and metadata
    states, queue                  stay; a group that is not settled becomes TOMBSTONED
    meta                           gets a tombstone per task, so that no repair restores a record

The first transaction marks task and trajectories, so that they are neither read nor appended to;
the last one deletes the trajectories and clears the group. Each deletes a bounded number of
records. `storage.erasures` owns the tombstones, `maintenance.purge` the bytes in free pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from forge.core.errors import DataLoss
from forge.core.queue.groups import ERASED
from forge.v1 import common_pb2
from services.pool.data.commands import EraseTasks
from services.pool.data.removal.freed_groups import put_state
from services.pool.data.removal.orphans import ORPHAN_REASON
from services.pool.storage.change_log import delete_changes
from services.pool.storage.erasures import erased_group, is_erased, put_erasure
from services.pool.storage.groups.group_index import (
    INDEXED_STATES,
    StateMoves,
    after_late_seal,
    before_late_seal,
    stored_groups,
    tag_prefix,
)
from services.pool.storage.groups.group_records import group_record, intact_state
from services.pool.storage.groups.labels import label_keys
from services.pool.storage.groups.settled_index import remove_settled
from services.pool.storage.keys import group_key, queue_key, task_prefix
from services.pool.storage.records import (
    Deletions,
    Records,
    TrajectoryHeader,
    encode_header,
    intact_header,
)
from services.pool.storage.tables import CONTENT, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """The result of one transaction."""

    groups: int = 0
    trajectories: int = 0
    turns: int = 0
    rewards: int = 0
    unfinished: bool = False
    """More records than one transaction may delete."""

    def plus(self, other: Erased) -> Erased:
        """The sums; `unfinished` of `other`."""
        return Erased(
            groups=self.groups + other.groups,
            trajectories=self.trajectories + other.trajectories,
            turns=self.turns + other.turns,
            rewards=self.rewards + other.rewards,
            unfinished=other.unfinished,
        )


def tasks_with(records: Records, *, user: str, tag: str) -> list[str]:
    """Tasks of stored groups with this user or this tag; a damaged group has neither."""
    return [
        group.task.task_id
        for group, _ in stored_groups(records)
        if (user and group.task.user == user) or (tag and group.task.tag == tag)
    ]


def erase(records: Records, command: EraseTasks) -> Erased:
    """Erases tasks of `command`, up to its limits. Unknown and erased tasks count 0."""
    total = Erased()
    deletions = Deletions(limit=command.max_records)
    for task_id in command.task_ids:
        if not _has_bytes(records, task_id):
            continue
        _mark(records, task_id, now_unix_s=command.now_unix_s)
        records.delete_content(task_prefix(task_id), deletions)
        if records.has_any(CONTENT, task_prefix(task_id)):
            total = total.plus(Erased(unfinished=True))
            break
        total = total.plus(_finish(records, task_id))
    turns, rewards = (deletions.counts[table] for table in CONTENT)
    return replace(total, turns=turns, rewards=rewards)


def _has_bytes(records: Records, task_id: str) -> bool:
    """True if a task is stored and not completely erased."""
    if records.has_any((*CONTENT, Table.TRAJECTORIES), task_prefix(task_id)):
        return True
    if not records.has(Table.GROUPS, group_key(task_id)):
        return False
    group = _intact_group(records, task_id)
    return not is_erased(records, task_id) or group is None or group != erased_group(group)


def _intact_group(records: Records, task_id: str) -> common_pb2.GroupRecord | None:
    try:
        return group_record(records, task_id)
    except DataLoss:
        return None


def _mark(records: Records, task_id: str, *, now_unix_s: float) -> None:
    """Refuses reads and writes of a task from this transaction on."""
    put_erasure(records, task_id)
    prefix = task_prefix(task_id)
    for key, value in list(records.scan_checksummed(Table.TRAJECTORIES, prefix=prefix)):
        header = intact_header(key, value) or TrajectoryHeader()
        delete_changes(records, header)
        closed = common_pb2.TRAJECTORY_STATE_ABANDONED if header.is_open else header.state
        freed = msgspec.structs.replace(
            header,
            state=closed,
            freed=True,
            reason="",
            outcome=None,
            closed_change=0,
            rewarded_change=0,
        )
        if freed != header:
            records.put(Table.TRAJECTORIES, key, encode_header(freed))
    before = intact_state(records, task_id)
    if before is None or not before.freed_unix_s:
        _put_erased_state(records, task_id, before, now_unix_s=now_unix_s)


def _put_erased_state(
    records: Records, task_id: str, before: common_pb2.GroupRecord | None, *, now_unix_s: float
) -> None:
    after = common_pb2.GroupRecord(freed_unix_s=now_unix_s)
    if before is not None and before.state in INDEXED_STATES:
        after.MergeFrom(before)
        after.freed_unix_s = now_unix_s
    else:
        after.state = common_pb2.GROUP_STATE_TOMBSTONED
    if records.has(Table.GROUPS, group_key(task_id)):
        if after.state == common_pb2.GROUP_STATE_TOMBSTONED:
            after.reason = ERASED
        moves = StateMoves(records)
        put_state(records, task_id, after, moves, now_unix_s=now_unix_s)
        moves.store()
        return
    # The mark of an orphan: a state without a group.
    remove_settled(records, task_id, before)
    after.reason = ORPHAN_REASON
    after.settled_unix_s = after.settled_unix_s or now_unix_s
    records.put(Table.STATES, group_key(task_id), after.SerializeToString())


def _finish(records: Records, task_id: str) -> Erased:
    """Deletes the trajectories of a task and clears its group."""
    settled = before_late_seal(records, task_id, past_damage=True)
    prefix = task_prefix(task_id)
    keys = [key for key, _ in records.scan_checksummed(Table.TRAJECTORIES, prefix=prefix)]
    for key in keys:
        records.delete(Table.TRAJECTORIES, key)
    after_late_seal(records, settled)
    remove_settled(records, task_id, intact_state(records, task_id))
    key = group_key(task_id)
    if not records.has(Table.GROUPS, key):
        return Erased(trajectories=len(keys))
    group = _intact_group(records, task_id)
    if group is None:
        # A damaged record may have the payload; the queue has its place.
        stored = (group for group, _ in stored_groups(records) if group.task.task_id == task_id)
        group = next(stored, None)
    # LMDB joins pages that have become empty when a record goes, not when one gets smaller.
    records.delete(Table.GROUPS, key)
    if group is not None:
        task = group.task
        place = queue_key(task.purpose, group.queue_index, task_id)
        records.delete(Table.TAGS, tag_prefix(task.tag) + place)
        erased = erased_group(group)
        for label in set(label_keys(task)) - set(label_keys(erased.task)):
            records.delete(Table.LABELS, label)
        records.put(Table.GROUPS, key, erased.SerializeToString())
    return Erased(groups=1, trajectories=len(keys))
