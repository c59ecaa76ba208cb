"""Integrity check of a shard: checksums, encodings, and rules between records.

Reads one snapshot, holds one trajectory in memory, and continues after damage.

    turns         decode, match the head stored with them, belong to a trajectory
    trajectories  closed ones have what their seal counted, sealed ones form a tree
    rewards       decode, belong to a trajectory, credit one of its turns
    queue         entries have a group and a state, groups have an entry
    changes       every close is logged, and every entry has its trajectory
    indexes       of groups, and counters of settled ones: as a recount has them
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import lmdb
import msgspec
from google.protobuf.message import DecodeError

from forge.core.errors import DataLoss, ForgeError, InvalidArgument
from forge.core.trajectory import sequence_lengths
from forge.v1 import common_pb2
from services.pool import validation
from services.pool.data.closed_digests import Mark, marks_of, rewards_damage, turns_damage
from services.pool.data.removal.orphans import ORPHAN_REASON
from services.pool.data.summaries import count_turns
from services.pool.maintenance.index_integrity import index_damage
from services.pool.storage.change_log import (
    change_key,
    decode_change,
    newest_change,
    number_of_change_key,
)
from services.pool.storage.keys import (
    group_key,
    index_of_turn_key,
    name_of_trajectory_key,
    queue_key,
    task_of_queue_key,
    trajectory_key,
    trajectory_of_turn_key,
)
from services.pool.storage.record_names import describe
from services.pool.storage.records import (
    Payload,
    Records,
    TrajectoryHeader,
    TurnHead,
    checksum_of,
    decode_header,
    decode_turn_head,
    open_value,
    turn_of_payload,
)
from services.pool.storage.tables import Table

_SEALED = common_pb2.TRAJECTORY_STATE_SEALED


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One damaged record."""

    table: Table
    key: bytes
    what: str

    def __str__(self) -> str:
        return f"{self.table.value} {describe(self.table, self.key)}: {self.what}"


class Checker:
    """One pass over one snapshot."""

    def __init__(
        self,
        transaction: Any,
        databases: dict[Table, Any],
        *,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`progress` is called before each record."""
        self._transaction = transaction
        self._databases = databases
        self._records = Records(transaction, databases)
        self._progress = progress
        self._found: list[Damage] = []
        self._damaged: set[Table] = set()
        """Tables with damage so far."""

    def damage(self) -> Iterator[Damage]:
        """All damage, table by table."""
        for look in (
            self._check_others,
            self._check_turns,
            self._check_trajectories,
            self._check_rewards,
            self._check_groups,
            self._check_queue,
            self._check_changes,
            self._check_indexes,
        ):
            for _ in look():
                yield from self._taken()
            yield from self._taken()

    def _taken(self) -> list[Damage]:
        found, self._found = self._found, []
        return found

    def _add(self, table: Table, key: bytes, what: str) -> None:
        self._damaged.add(table)
        self._found.append(Damage(table=table, key=key, what=what))

    def _scan(self, table: Table) -> Iterator[tuple[bytes, Payload]]:
        """Intact records; damage to others is added."""
        try:
            with self._transaction.cursor(db=self._databases[table]) as cursor:
                for key, value in cursor:
                    self._progress()
                    try:
                        yield bytes(key), open_value(table, bytes(key), value)
                    except DataLoss:
                        self._add(table, bytes(key), "the checksum does not match")
        except lmdb.Error as error:
            self._add(table, b"", f"cannot be read to its end: {error}")

    def _get(self, table: Table, key: bytes) -> Payload | None:
        """None for a damaged record, too: the scan of its table adds that."""
        try:
            return self._records.get(table, key)
        except (DataLoss, lmdb.Error):
            return None

    def _has(self, table: Table, key: bytes) -> bool:
        try:
            return self._records.get(table, key) is not None
        except DataLoss:
            return True
        except lmdb.Error:
            return False

    def _header(self, trajectory: bytes) -> TrajectoryHeader | None:
        payload = self._get(Table.TRAJECTORIES, trajectory)
        if payload is None:
            return None
        try:
            return decode_header(payload)
        except msgspec.MsgspecError:
            return None

    def _check_others(self) -> Iterator[None]:
        """Tables with checksums and no other rule."""
        for table in Table:
            if table not in _RULED:
                for _ in self._scan(table):
                    yield

    def _check_turns(self) -> Iterator[None]:
        entries = self._scan(Table.TURNS)
        for trajectory, turns in groupby(
            entries, key=lambda entry: trajectory_of_turn_key(entry[0])
        ):
            heads: list[TurnHead] = []
            marks: list[Mark] = []
            size_bytes = 0
            for key, payload in turns:
                size_bytes += len(payload)
                marks.append((key, checksum_of(key, payload)))
                head = self._turn(key, payload)
                if head is not None:
                    heads.append(head)
                yield
            if not self._has(Table.TRAJECTORIES, trajectory):
                self._add(
                    Table.TRAJECTORIES,
                    trajectory,
                    f"is not there, though {len(heads)} turns of it are",
                )
            header = self._header(trajectory)
            # A trajectory that is being freed is incomplete.
            if header is not None and not header.is_open and not header.freed:
                self._check_seal(trajectory, header, heads, size_bytes, marks)

    def _turn(self, key: bytes, payload: Payload) -> TurnHead | None:
        index = index_of_turn_key(key)
        try:
            head = decode_turn_head(index, payload)
            turn = validation.new_turn(bytes(turn_of_payload(payload)))
        except (ForgeError, ValueError, struct.error) as error:
            self._add(Table.TURNS, key, str(error))
            return None
        if trajectory_key(turn.trajectory) + key[-4:] != key or turn.head.turn_index != index:
            self._add(Table.TURNS, key, f"holds turn {turn.head.turn_index} of {turn.trajectory}")
        elif turn.head != head:
            self._add(Table.TURNS, key, f"has head {head}, but its turn says {turn.head}")
        return head

    def _check_seal(
        self,
        trajectory: bytes,
        header: TrajectoryHeader,
        heads: list[TurnHead],
        size_bytes: int,
        marks: list[Mark],
    ) -> None:
        counted = count_turns(header, heads)
        if header.turn_bytes:
            counted = msgspec.structs.replace(counted, turn_bytes=size_bytes)
        if not header.prompt_tokens:  # closed by a version without it
            counted = msgspec.structs.replace(counted, prompt_tokens=0)
        if counted != header:
            self._add(
                Table.TRAJECTORIES,
                trajectory,
                f"was closed with {_counts(header)}, but there are {_counts(counted)}",
            )
        elif damage := turns_damage(header, marks):
            self._add(Table.TRAJECTORIES, trajectory, damage)
        if header.state == _SEALED:
            try:
                sequence_lengths(heads)
            except InvalidArgument as error:
                self._add(Table.TRAJECTORIES, trajectory, str(error))

    def _check_trajectories(self) -> Iterator[None]:
        for key, payload in self._scan(Table.TRAJECTORIES):
            try:
                header = decode_header(payload)
                name_of_trajectory_key(key)
            except (msgspec.MsgspecError, ValueError, struct.error) as error:
                self._add(Table.TRAJECTORIES, key, f"cannot be decoded: {error}")
                continue
            if header.turns and not header.freed and not self._has_turns(key):
                self._add(
                    Table.TRAJECTORIES, key, f"was closed with {header.turns} turns: all gone"
                )
            with suppress(DataLoss, lmdb.Error):  # Noted where the rewards are gone through.
                rewards = marks_of(self._records, Table.REWARDS, key)
                if damage := rewards_damage(key, header, rewards):
                    self._add(Table.TRAJECTORIES, key, damage)
            logged = header.closed_change
            if (
                not header.is_open
                and not header.freed
                and not (logged and self._has(Table.CHANGES, change_key(logged)))
            ):
                self._add(Table.TRAJECTORIES, key, "is closed, but not in the change log")
            yield

    def _has_turns(self, trajectory: bytes) -> bool:
        with self._transaction.cursor(db=self._databases[Table.TURNS]) as cursor:
            return bool(cursor.set_range(trajectory)) and bytes(cursor.key()).startswith(trajectory)

    def _check_rewards(self) -> Iterator[None]:
        for key, payload in self._scan(Table.REWARDS):
            # The task id holds no colon; two numbers follow the first one.
            trajectory = key[: key.find(b":") + 9]
            reward = self._parsed(common_pb2.RewardEvent, Table.REWARDS, key, payload)
            if reward is None:
                continue
            if trajectory + reward.event_id.encode() != key:
                self._add(Table.REWARDS, key, f"holds event {reward.event_id!r}")
            header = self._header(trajectory)
            if header is None:
                if not self._has(Table.TRAJECTORIES, trajectory):
                    self._add(Table.REWARDS, key, "its trajectory is not there")
            elif header.state == _SEALED and reward.turn_index >= header.turns:
                self._add(
                    Table.REWARDS,
                    key,
                    f"credits turn {reward.turn_index} of a trajectory of {header.turns}",
                )
            yield

    def _check_groups(self) -> Iterator[None]:
        for key, payload in self._scan(Table.GROUPS):
            group = self._parsed(common_pb2.GroupRecord, Table.GROUPS, key, payload)
            if group is None:
                continue
            task = group.task
            if task.task_id.encode() != key:
                self._add(Table.GROUPS, key, f"holds group {task.task_id!r}")
            if not self._has(Table.STATES, key):
                self._add(Table.GROUPS, key, "has no state")
            place = queue_key(task.purpose, group.queue_index, task.task_id)
            if not self._has(Table.QUEUE, place):
                self._add(Table.GROUPS, key, "is not in the queue")
            yield
        for key, payload in self._scan(Table.STATES):
            state = self._parsed(common_pb2.GroupRecord, Table.STATES, key, payload)
            if state is not None and state.state not in common_pb2.GroupState.values()[1:]:
                self._add(Table.STATES, key, f"has state {state.state}, which is unknown")
            orphan = state is not None and state.reason == ORPHAN_REASON
            if not orphan and not self._has(Table.GROUPS, key):
                self._add(Table.STATES, key, "its group is not there")
            yield

    def _check_queue(self) -> Iterator[None]:
        for key, _ in self._scan(Table.QUEUE):
            task_id = task_of_queue_key(key)
            payload = self._get(Table.GROUPS, group_key(task_id))
            if payload is None:
                if not self._has(Table.GROUPS, group_key(task_id)):
                    self._add(Table.QUEUE, key, "its group is not there")
            else:
                group = common_pb2.GroupRecord.FromString(bytes(payload))
                if queue_key(group.task.purpose, group.queue_index, task_id) != key:
                    self._add(Table.QUEUE, key, "its group has another place in the queue")
            yield

    def _check_changes(self) -> Iterator[None]:
        newest: float = math.inf
        with suppress(DataLoss):  # Found by the scan of its table.
            newest = newest_change(self._records)
        for key, payload in self._scan(Table.CHANGES):
            number = number_of_change_key(key)
            try:
                change = decode_change(payload)
            except msgspec.MsgspecError as error:
                self._add(Table.CHANGES, key, f"cannot be decoded: {error}")
                continue
            if number > newest:
                self._add(Table.CHANGES, key, f"is newer than the newest, {newest}")
            header = self._header(change.trajectory)
            if header is None:
                if not self._has(Table.TRAJECTORIES, change.trajectory):
                    self._add(Table.CHANGES, key, "its trajectory is not there")
            elif number not in (header.closed_change, header.rewarded_change):
                self._add(Table.CHANGES, key, "its trajectory knows nothing of it")
            yield

    def _check_indexes(self) -> Iterator[None]:
        try:
            for found in index_damage(self._records, readable=not self._damaged & _INDEXED):
                if found is not None:
                    self._add(*found)
                yield
        except lmdb.Error:
            return  # Noted where that table is gone through.

    def _parsed(self, kind: Any, table: Table, key: bytes, payload: Payload) -> Any:
        try:
            return kind.FromString(bytes(payload))
        except DecodeError as error:
            self._add(table, key, f"cannot be decoded: {error}")
            return None


_RULED = frozenset(
    {
        Table.GROUPS,
        Table.STATES,
        Table.QUEUE,
        Table.TRAJECTORIES,
        Table.TURNS,
        Table.REWARDS,
        Table.CHANGES,
    }
)
"""Tables whose records are held against others."""
_INDEXED = frozenset({Table.GROUPS, Table.STATES, Table.QUEUE, Table.TRAJECTORIES})
"""Tables that the indexes and counters of groups are made from."""


def _counts(header: TrajectoryHeader) -> str:
    size = f", {header.turn_bytes} bytes" if header.turn_bytes else ""
    prompts = f", {header.prompt_tokens} prompt tokens" if header.prompt_tokens else ""
    return (
        f"{header.turns} turns, {header.sampled_tokens} sampled tokens{prompts}, versions "
        f"{header.min_weight_version} to {header.max_weight_version}{size}"
    )
