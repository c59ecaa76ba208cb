"""Counts of trajectories and groups, by domain and state.

Counts in slices, each a snapshot of its own: the writer cannot reuse freed pages during a long one.
"""

from __future__ import annotations

from collections import Counter

from forge.v1 import common_pb2, pool_pb2
from services.pool.data.reads.reads import queued_group
from services.pool.storage.groups.group_records import group_state
from services.pool.storage.groups.moved_groups import is_moved
from services.pool.storage.keys import name_of_trajectory_key
from services.pool.storage.records import Payload, Records, decode_header
from services.pool.storage.tables import Table

SLICE = 10_000
"""Records looked at in one snapshot."""

_PENDING = common_pb2.GROUP_STATE_PENDING
_SEALED = common_pb2.TRAJECTORY_STATE_SEALED
_Stats = pool_pb2.GetPoolStatsResponse


class Tally:
    """Counts that grow slice by slice."""

    def __init__(self) -> None:
        self._trajectories: dict[tuple[str, int], _Stats.TrajectoryCount] = {}
        self._groups: Counter[tuple[str, int, int]] = Counter()
        self._oldest: common_pb2.GroupRecord | None = None
        self._oldest_closed_unix_s = 0.0
        self._table = Table.TRAJECTORIES
        self._after = b""
        self._last_state: tuple[str, int] = ("", 0)
        """Task looked up last, and the state of its group."""

    def advance(self, records: Records) -> bool:
        """Counts one slice; whether anything is left."""
        count = self._count_group if self._table is Table.QUEUE else self._count_trajectory
        for seen, (key, payload) in enumerate(records.scan(self._table, after=self._after)):
            if seen == SLICE:
                return True
            count(records, key, payload)
            self._after = key
        if self._table is Table.QUEUE:
            return False
        self._table, self._after = Table.QUEUE, b""
        return True

    def add_to(self, stats: _Stats) -> None:
        """Adds the counts to a response."""
        by_name = sorted(self._trajectories.items())
        stats.trajectory_counts.extend(count for _, count in by_name)
        for (domain, purpose, state), groups in sorted(self._groups.items()):
            stats.group_counts.add(
                domain=domain,
                purpose=common_pb2.Purpose.ValueType(purpose),
                state=common_pb2.GroupState.ValueType(state),
                groups=groups,
            )
        if self._oldest is not None:
            stats.oldest_pending_task_id = self._oldest.task.task_id
            stats.oldest_pending_queue_index = self._oldest.queue_index
        stats.oldest_pending_closed_unix_s = self._oldest_closed_unix_s

    def _count_trajectory(self, records: Records, key: bytes, payload: Payload) -> None:
        task_id = name_of_trajectory_key(key).task_id
        if is_moved(records, task_id):
            return
        header = decode_header(payload)
        place = (header.domain, header.state)
        count = self._trajectories.get(place)
        if count is None:
            state = common_pb2.TrajectoryState.ValueType(header.state)
            count = _Stats.TrajectoryCount(domain=header.domain, state=state)
            self._trajectories[place] = count
        count.trajectories += 1
        count.turns += header.turns
        count.sampled_tokens += header.sampled_tokens
        count.turn_bytes += header.turn_bytes
        if header.state == _SEALED and self._waits(records, task_id):
            closed_unix_s = header.sealed_unix_s
            first = self._oldest_closed_unix_s
            self._oldest_closed_unix_s = min(first, closed_unix_s) if first else closed_unix_s

    def _waits(self, records: Records, task_id: str) -> bool:
        """Whether a task's group is pending; trajectories of a task are adjacent."""
        if self._last_state[0] != task_id:
            state = group_state(records, task_id)
            self._last_state = (task_id, state.state if state else 0)
        return self._last_state[1] == _PENDING

    def _count_group(self, records: Records, key: bytes, payload: Payload) -> None:
        group = queued_group(records, key)
        if group.state == common_pb2.GROUP_STATE_MOVED:
            return
        self._groups[group.task.domain, group.task.purpose, group.state] += 1
        trains = group.task.purpose == common_pb2.PURPOSE_TRAIN
        if self._oldest is None and trains and group.state == _PENDING:
            self._oldest = group
