"""Reads of a shard: summaries, whole trajectories, groups in queue order.

Owns the conversion of stored records to messages. Every function sees one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from forge.core.errors import DataLoss, NotFound
from forge.core.queue.dispatch.failures import FailureKind, kind_of_abandoned
from forge.core.trajectory import TrajectoryName, parse_trajectory_id
from forge.runtime.telemetry import log
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.closed_digests import checked_rewards, checked_turns
from services.pool.data.summaries import compact, header_of, shorten, summarize
from services.pool.storage.groups.group_records import group_record, group_state, intact_state
from services.pool.storage.groups.settled_counts import commit_of
from services.pool.storage.keys import (
    SHARD_KEY,
    group_key,
    name_of_trajectory_key,
    place_of_queue_key,
    task_of_queue_key,
    task_prefix,
    trajectory_key,
)
from services.pool.storage.records import Payload, Records, is_intact_entry, turn_of_payload
from services.pool.storage.tables import Table

MOST_GROUP_BYTES = 2 << 20
"""A larger group is shortened in a scan: a message also has a page of other groups before it."""
_LENGTH_DELIMITED = 2


def summaries(
    records: Records, names: Sequence[TrajectoryName]
) -> list[common_pb2.TrajectorySummary]:
    """Summaries in the order of `names`, without unknown ones."""
    found = (summarize(records, name) for name in names)
    return [summary for summary in found if summary is not None]


def trajectories(
    records: Records, names: Sequence[TrajectoryName], *, limit_bytes: int
) -> list[bytes]:
    """Serialized Trajectories in the order of `names`, until they reach `limit_bytes`."""
    found: list[bytes] = []
    size_bytes = 0
    for name in names:
        found.append(_trajectory(records, name))
        size_bytes += len(found[-1])
        if size_bytes >= limit_bytes:
            break
    return found


def _trajectory(records: Records, name: TrajectoryName) -> bytes:
    """Raises `NotFound`, and `DataLoss` if a record is damaged.

    Turns and rewards are stored as sent, so they are framed and joined, not parsed: concatenated
    protobuf encodings merge.
    """
    key = trajectory_key(name)
    header = header_of(records, key)
    if header is None:
        raise NotFound(f"trajectory {name} is not on this shard")
    if header.freed:
        raise NotFound(f"trajectory {name} was freed: only its summary is left")
    message = common_pb2.Trajectory(
        trajectory_id=name.trajectory_id,
        task_id=name.task_id,
        domain=header.domain,
        state=common_pb2.TrajectoryState.ValueType(header.state),
        reason=header.reason,
        sealed_unix_s=header.sealed_unix_s,
        closing_agent_s=header.closing_agent_s,
    )
    pieces: list[Payload] = [message.SerializeToString()]
    for payload in checked_turns(records, key, header):
        turn = turn_of_payload(payload)
        pieces += (_frame(common_pb2.Trajectory.TURNS_FIELD_NUMBER, len(turn)), turn)
    for reward in checked_rewards(records, key, header):
        pieces += (_frame(common_pb2.Trajectory.REWARDS_FIELD_NUMBER, len(reward)), reward)
    return b"".join(pieces)


def _frame(field_number: int, length: int) -> bytes:
    """Tag and length before one length-delimited field of a protobuf message."""
    return _varint(field_number << 3 | _LENGTH_DELIMITED) + _varint(length)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPage:
    """Some groups with their trajectories, in queue order."""

    groups: list[pool_pb2.ScanGroupsResponse]
    last_key: bytes
    """Continue after it; b"" when nothing is left."""
    whole: int
    """Number of groups with a record."""
    damaged: int
    """Damaged entries, which were skipped."""


def groups(
    records: Records,
    *,
    after: bytes,
    limit: int,
    limit_bytes: int,
    brief: bool,
    table: Table = Table.QUEUE,
    prefix: bytes = b"",
) -> GroupPage:
    """The groups whose key in an index follows `after`, until one of the limits is reached. Keys
    of the index are `prefix` and a place in the queue."""
    page: list[pool_pb2.ScanGroupsResponse] = []
    size_bytes = whole = damaged = 0
    for key, value in records.scan_checksummed(table, prefix=prefix, after=after):
        if not is_intact_entry(key, value):
            # It may name another group or place; only the group's record is reliable.
            log.error("queue_entry_damaged", key=key.hex())
            damaged += 1
            continue
        group = queued_group(records, key[len(prefix) :])
        whole += records.has(Table.GROUPS, group_key(group.task.task_id))
        if group.state == common_pb2.GROUP_STATE_MOVED:
            continue
        response = _scanned(records, group, brief=brief)
        page.append(response)
        size_bytes += response.ByteSize()
        if len(page) >= limit or size_bytes >= limit_bytes:
            return GroupPage(groups=page, last_key=key, whole=whole, damaged=damaged)
    return GroupPage(groups=page, last_key=b"", whole=whole, damaged=damaged)


def scanned_group(records: Records, task_id: str, *, brief: bool) -> pool_pb2.ScanGroupsResponse:
    """One group by its record. Raises `DataLoss` when that cannot be read."""
    return _scanned(records, _stored_group(records, task_id), brief=brief)


def groups_of(
    records: Records, task_ids: Sequence[str], *, limit: int, limit_bytes: int, absent: bool
) -> tuple[list[pool_pb2.ScanGroupsResponse], int]:
    """The groups of the first tasks, in brief, until one of the limits is reached, and the number
    of tasks read. Tasks without a group are skipped; with `absent` they count as moved."""
    page: list[pool_pb2.ScanGroupsResponse] = []
    size_bytes = 0
    for taken, task_id in enumerate(task_ids):
        if taken >= limit or size_bytes >= limit_bytes:
            return page, taken
        if not records.has(Table.GROUPS, group_key(task_id)):
            if absent:
                gone = common_pb2.GroupRecord(state=common_pb2.GROUP_STATE_MOVED)
                gone.task.task_id = task_id
                page.append(pool_pb2.ScanGroupsResponse(group=gone))
            continue
        try:
            group = _stored_group(records, task_id)
        except DataLoss as error:
            # The result of an earlier scan remains valid.
            log.error("group_not_readable", task_id=task_id, error=str(error))
        else:
            page.append(_scanned(records, group, brief=True))
            size_bytes += page[-1].ByteSize()
    return page, len(task_ids)


def erased_group(records: Records, task_id: str) -> pool_pb2.ScanGroupsResponse:
    """Id, state and reason of an erased task; no state if that is damaged."""
    state = intact_state(records, task_id) or common_pb2.GroupRecord()
    group = common_pb2.GroupRecord(state=state.state, reason=state.reason)
    group.task.task_id = task_id
    return pool_pb2.ScanGroupsResponse(group=group)


def look_up(
    records: Records, request: pool_pb2.LookUpGroupsRequest, *, limit_bytes: int
) -> pool_pb2.LookUpGroupsResponse:
    """Groups and commits of the first ids, until the limit is reached."""
    answer = pool_pb2.LookUpGroupsResponse()
    size_bytes = 0
    for task_id in request.task_ids:
        if size_bytes >= limit_bytes:
            return answer
        answer.answered += 1
        if not records.has(Table.GROUPS, group_key(task_id)):
            continue
        answer.groups.append(_known_group(records, task_id))
        size_bytes += answer.groups[-1].ByteSize()
    for batch_id in request.batch_ids:
        commit = commit_of(records, batch_id)
        if commit is not None:
            answer.commits.add(batch_id=batch_id, step=commit.step)
        answer.answered += 1
    return answer


def _known_group(records: Records, task_id: str) -> common_pb2.GroupRecord:
    """A damaged group has its id alone."""
    group = common_pb2.GroupRecord(task=common_pb2.Task(task_id=task_id))
    try:
        group = _stored_group(records, task_id)
    except DataLoss as error:
        log.error("group_not_readable", task_id=task_id, error=str(error))
    if group.task_digest:
        group.task.CopyFrom(common_pb2.Task(task_id=task_id))
    return group


def outcome_of(records: Records, trajectory: bytes) -> float | None:
    """Sum of the outcome rewards of a trajectory; None for a damaged one."""
    try:
        summary = summarize(records, name_of_trajectory_key(trajectory), brief=True)
    except DataLoss as error:
        log.error("trajectory_not_scanned", trajectory=trajectory.hex(), error=str(error))
        return None
    if summary is None:
        return None
    kind = common_pb2.REWARD_KIND_OUTCOME
    return sum(event.value for event in summary.rewards if event.kind == kind)


def queued_group(records: Records, key: bytes) -> common_pb2.GroupRecord:
    """Record and state in one, by the group's key in the queue.

    A damaged group counts as tombstoned: it must not prevent a leader from starting.
    """
    task_id = task_of_queue_key(key)
    try:
        return _stored_group(records, task_id)
    except DataLoss as error:
        log.error("group_not_readable", task_id=task_id, error=str(error))
        return _lost_group(records, key, reason=str(error))


def _stored_group(records: Records, task_id: str) -> common_pb2.GroupRecord:
    """Raises `DataLoss` unless record and state can be read."""
    group, state = group_record(records, task_id), group_state(records, task_id)
    if group is None or state is None:
        raise DataLoss(f"group {task_id} is queued but has no record")
    group.MergeFrom(state)
    return group


def _lost_group(records: Records, key: bytes, *, reason: str) -> common_pb2.GroupRecord:
    """The remains of a damaged group: its place in the queue, and a final state."""
    purpose, queue_index = place_of_queue_key(key)
    task_id = task_of_queue_key(key)
    task = common_pb2.Task(task_id=task_id, purpose=purpose, group_size=1)
    group = common_pb2.GroupRecord(task=task, queue_index=queue_index)
    with suppress(DataLoss):
        group.pool_shard = records.meta_text(SHARD_KEY)
        group.MergeFrom(group_state(records, task_id) or common_pb2.GroupRecord())
    if group.state in (
        common_pb2.GROUP_STATE_UNSPECIFIED,
        common_pb2.GROUP_STATE_PENDING,
        common_pb2.GROUP_STATE_BATCHED,
    ):
        group.state, group.reason = common_pb2.GROUP_STATE_TOMBSTONED, reason
    return group


def _scanned(
    records: Records, group: common_pb2.GroupRecord, *, brief: bool
) -> pool_pb2.ScanGroupsResponse:
    """Without damaged trajectories: a scheduler has others sampled."""
    task_id = group.task.task_id
    if brief and group.settled_unix_s and group.task_digest:
        group.task.payload_json = ""
    response = pool_pb2.ScanGroupsResponse(group=group)
    for key, _ in records.scan_checksummed(Table.TRAJECTORIES, prefix=task_prefix(task_id)):
        try:
            summary = summarize(records, name_of_trajectory_key(key), brief=brief)
        except DataLoss as error:
            log.error("trajectory_not_scanned", task_id=task_id, error=str(error))
        else:
            assert summary is not None, "its key was just read"
            response.trajectories.append(summary)
    if response.ByteSize() > MOST_GROUP_BYTES:
        shorten_group(response)
    return response


def shorten_group(response: pool_pb2.ScanGroupsResponse) -> None:
    """Shortens a group that would not fit a message; keeps the facts that a leader needs: outcomes,
    and for each rollout the newest of the attempts that the infrastructure ended; at last the
    attempt of each rollout that counts."""
    for summary in response.trajectories:
        shorten(summary)
    if response.ByteSize() <= MOST_GROUP_BYTES:
        return
    named = [(parse_trajectory_id(one.trajectory_id), one) for one in response.trajectories]
    newest: dict[int, int] = {}
    for name, _ in named:
        newest[name.rollout_index] = max(name.attempt, newest.get(name.rollout_index, 0))
    kept = [
        summary
        for name, summary in named
        if name.attempt == newest[name.rollout_index] or not _is_lost(summary)
    ]
    _replace(response, kept)
    if response.ByteSize() <= MOST_GROUP_BYTES:
        return
    _replace(response, map(compact, kept))
    if response.ByteSize() <= MOST_GROUP_BYTES:
        return
    # The counts of failures are lost: no group of `MAX_GROUP_SIZE` may exceed a message.
    decisive: dict[int, common_pb2.TrajectorySummary] = {}
    for summary in list(response.trajectories):
        index = parse_trajectory_id(summary.trajectory_id).rollout_index
        # In order of attempts: the first sealed one counts, else the newest.
        if index not in decisive or decisive[index].state != common_pb2.TRAJECTORY_STATE_SEALED:
            decisive[index] = summary
    _replace(response, list(decisive.values()))


def _replace(
    response: pool_pb2.ScanGroupsResponse, summaries: Iterable[common_pb2.TrajectorySummary]
) -> None:
    kept = list(summaries)
    del response.trajectories[:]
    response.trajectories.extend(kept)


def _is_lost(summary: common_pb2.TrajectorySummary) -> bool:
    abandoned = summary.state == common_pb2.TRAJECTORY_STATE_ABANDONED
    return abandoned and kind_of_abandoned(summary.reason) is FailureKind.INFRASTRUCTURE
