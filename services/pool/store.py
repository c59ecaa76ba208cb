"""One shard of the pool on disk: group commits in, snapshots out.

Owns the shard's identity, and the refusal of turns before the disk is full. `commit` blocks until
the transaction is on disk and belongs to one thread; any thread may call the rest.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from forge.core.errors import ConfigError, ForgeError, ResourceExhausted
from forge.core.trajectory import TaskId, TrajectoryName
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import (
    AppendRewards,
    AppendTurns,
    Command,
    DiscardCopy,
    EraseTasks,
    FollowLeader,
    FreeGroups,
    ImportGroup,
    MarkMoved,
    MarkOrphans,
    MendIndex,
    NoteErasures,
    PutGroups,
    RepairUnit,
    SealTrajectory,
    SetGroupStates,
    StageRecords,
)
from services.pool.data.group_transfer import discard_copy, import_group, mark_moved, stage_records
from services.pool.data.reads import reads
from services.pool.data.reads.group_scan import (
    PAGE_BYTES,
    BoundedScan,
    ErasedScan,
    GroupScan,
    TaskScan,
    count_settled,
    find_newest_settled,
)
from services.pool.data.removal.freed_groups import free
from services.pool.data.removal.orphans import OrphanPage, mark, orphans_after
from services.pool.data.removal.task_erasure import erase
from services.pool.data.repair.index_mending import mend
from services.pool.data.repair.record_repair import repair_from_replica
from services.pool.data.writes.seal_trajectory import append_rewards, seal
from services.pool.data.writes.store_groups import fence_of, put_groups, set_group_states, term_of
from services.pool.data.writes.store_turns import store_turns
from services.pool.storage.change_trackers import (
    ChangeListener,
    CommitChanges,
    RecentChanges,
    Since,
)
from services.pool.storage.environment.lmdb_env import DISK_RETRY_S, Environment, OnPanic
from services.pool.storage.erasures import note_erasures
from services.pool.storage.groups.group_index import tag_prefix
from services.pool.storage.groups.indexed_groups import NewestSettled, is_whole, trained_after
from services.pool.storage.groups.moved_groups import moved_groups
from services.pool.storage.groups.settled_index import SettledGroup, settled_after
from services.pool.storage.journal import (
    Changes,
    ReplicaState,
    begin_replication,
    follow,
    log_commit,
    replica_state,
)
from services.pool.storage.keys import LINEAGE_KEY, SHARD_KEY
from services.pool.storage.records import Records
from services.pool.storage.tables import Table

T = TypeVar("T")
OnCommit = Callable[[int, Changes], None]
"""Receives the position and the changes of a commit that is on disk."""


class PoolStore:
    """The records of one shard."""

    def __init__(
        self,
        directory: Path,
        *,
        shard: str = "",
        map_bytes: int = 1 << 28,
        map_max_bytes: int = 1 << 40,
        disk_reserve_bytes: int = 0,
        max_readers: int = 16,
        on_panic: OnPanic = lambda _: None,
    ) -> None:
        """Opens the shard in `directory`, or makes it.

        `shard` names it; empty takes the name it has, or draws one. Turns are refused when less
        than `disk_reserve_bytes` are free, so that seals and batch states still find room. The
        store calls `on_panic` once when LMDB no longer serves the shard. Raises `ConfigError` or
        `DataLoss` when the shard cannot be opened.
        """
        self.environment = Environment(
            directory,
            map_bytes=map_bytes,
            map_max_bytes=map_max_bytes,
            max_readers=max_readers,
            on_panic=on_panic,
        )
        self.disk_reserve_bytes = disk_reserve_bytes
        self._refused = ""
        """Why the last commit was refused for lack of room; "" if it was not."""
        self._on_commit: OnCommit | None = None
        self._recent = RecentChanges()
        self.confirmed_position = 0
        """Newest commit that a follower has confirmed; stored with the next commit."""
        try:
            self.shard = self.environment.write(lambda records: _settle_names(records, shard))
            """Name of this shard, generated once and stored with the data."""
            self.directory_id = self.environment.identity()
            """Identity of the data directory; a copy of the data gets another."""
        except BaseException:
            self.close()
            raise

    @property
    def directory(self) -> Path:
        """The data directory."""
        return self.environment.directory

    def lineage(self) -> str:
        """Identity of the store, the same in all its replicas and copies. Empty while a whole copy
        has just begun."""
        return self.environment.read(lambda records: records.meta_text(LINEAGE_KEY))

    def commit(self, commands: Sequence[Command]) -> list[Any]:
        """Applies `commands` in order and returns once they are on disk, in one fsync.

        Returns one answer per command, or the ForgeError that refused it. Raises
        `ResourceExhausted`, and stores nothing, if the disk does not take the commit.
        """
        full = self._room_is_scarce()
        changes = CommitChanges()

        def apply_all(records: Records) -> tuple[list[Any], int]:
            # The transaction may run again from the start.
            changes.records.clear()
            answers = [
                full if full and isinstance(command, AppendTurns) else _apply(command, records)
                for command in commands
            ]
            if not changes.records:
                return answers, 0
            confirmed = self.confirmed_position
            return answers, log_commit(records, changes.records, confirmed_position=confirmed)

        try:
            answers, position = self.write(
                apply_all, listeners=() if self._on_commit is None else (changes,)
            )
        except ResourceExhausted as error:
            self._refused = str(error)
            raise
        self._refused = ""
        if self._on_commit is not None and position:
            self._on_commit(position, changes.records)
        return answers

    def count_commits(self, on_commit: OnCommit) -> ReplicaState:
        """From now on commits get positions, enter the journal and go to `on_commit`, on the
        committing thread; the state before the first."""
        state = self.identify()
        self._on_commit = on_commit
        return state

    def identify(self) -> ReplicaState:
        """The state of this replica, under the identity of its directory."""
        return self.write(partial(begin_replication, replica_id=self.directory_id))

    def write(
        self, change: Callable[[Records], T], *, listeners: Sequence[ChangeListener] = ()
    ) -> T:
        """Changes records in one transaction; on the writer's thread, or while it is idle."""
        answer = self.environment.write(change, listeners=(self._recent, *listeners))
        self._recent.committed()
        return answer

    def _room_is_scarce(self) -> ResourceExhausted | None:
        if not self.disk_reserve_bytes:
            return None
        room_bytes = self.environment.room_bytes
        if room_bytes >= self.disk_reserve_bytes:
            return None
        return ResourceExhausted(
            f"pool shard {self.shard} refuses turns: its disk and map have room for {room_bytes} "
            f"bytes, less than disk_reserve_bytes {self.disk_reserve_bytes}",
            retry_after_s=DISK_RETRY_S,
        )

    @property
    def short_of_room(self) -> bool:
        """True if the disk has too little space for a write, or had at the last refusal."""
        return bool(self.lack_of_room)

    @property
    def lack_of_room(self) -> str:
        """Why turns are refused for lack of room, the same text while that lasts; "" if they are
        accepted."""
        if not self._refused and self._room_is_scarce() is not None:
            return (
                "its disk and map have room for less than store.disk_reserve_bytes = "
                f"{self.disk_reserve_bytes}"
            )
        return self._refused

    def settled(self, *, after: bytes, limit: int) -> list[SettledGroup]:
        """Groups that can be freed after that entry of the index, the oldest first."""
        return self.read(lambda records: list(islice(settled_after(records, after), limit)))

    def orphans(self, *, after: bytes, limit: int) -> OrphanPage:
        """Tasks without a group among `limit` trajectories after that key."""
        return self.read(partial(orphans_after, after=after, limit=limit))

    def summaries(self, names: Sequence[TrajectoryName]) -> list[common_pb2.TrajectorySummary]:
        """Summaries in the order of `names`, without unknown ones."""
        return self.environment.read(lambda records: reads.summaries(records, names))

    def trajectories(
        self, names: Sequence[TrajectoryName], *, limit_bytes: int = 1 << 22
    ) -> list[bytes]:
        """Serialized Trajectories in the order of `names`, until they reach `limit_bytes`.

        Raises `NotFound` naming the first unknown one, `DataLoss` for a damaged one.
        """
        return self.environment.read(
            lambda records: reads.trajectories(records, names, limit_bytes=limit_bytes)
        )

    def scan(self, *, brief: bool = False) -> GroupScan:
        """Every group in queue order, then those without a queue entry."""
        return GroupScan(self.read, brief=brief)

    def scan_tasks(self, task_ids: Sequence[TaskId]) -> TaskScan:
        """The groups of tasks, in brief; tasks without one are skipped."""
        return TaskScan(self.read, task_ids)

    def scan_changed(self, task_ids: Sequence[TaskId]) -> TaskScan:
        """The groups of changed tasks, in brief; one that is not stored counts as moved: the copy
        of an import may have been discarded."""
        return TaskScan(self.read, task_ids, absent=True)

    def scan_erased(self, task_ids: Sequence[TaskId] | None) -> ErasedScan:
        """The erased groups among tasks, or all."""
        return ErasedScan(self.read, task_ids)

    def scan_tag(self, tag: str) -> GroupScan:
        """The groups of a tag, in queue order."""
        return GroupScan(self.read, table=Table.TAGS, prefix=tag_prefix(tag))

    def scan_trained(self, *, after: int) -> TaskScan | GroupScan:
        """The groups trained after a step, in brief, by step; every group if the index lacks an
        entry."""
        if not self.read(is_whole):
            return self.scan(brief=True)
        return self.scan_tasks(self.read(partial(trained_after, step=after)))

    def scan_newest(
        self, limit: int, *, whole: bool, counts: bool
    ) -> tuple[pool_pb2.SettledGroups, BoundedScan] | None:
        """The pending and the newest settled groups and, with `counts`, the counters of all settled
        groups; None if these cannot be read. `whole`: the scan is wanted."""

        def begin(records: Records) -> tuple[pool_pb2.SettledGroups, NewestSettled] | None:
            newest = find_newest_settled(records, limit=limit if whole else 0)
            if newest is None:
                return None
            settled = pool_pb2.SettledGroups()
            if whole:
                settled.left_out_step = newest.left_out_step
                settled.left_out_unix_s = newest.left_out_unix_s
            if counts and not count_settled(records, settled):
                return None
            return settled, newest

        found = self.read(begin)
        return None if found is None else (found[0], BoundedScan(self.read, found[1]))

    def look_up(self, request: pool_pb2.LookUpGroupsRequest) -> pool_pb2.LookUpGroupsResponse:
        """Groups by task id and commits by batch id, as many as fit in one message."""

        def look(records: Records) -> pool_pb2.LookUpGroupsResponse:
            found = reads.look_up(records, request, limit_bytes=PAGE_BYTES)
            found.fence, found.term = fence_of(records), term_of(records)
            return found

        return self.read(look)

    def changed_since(self, mark: str) -> Since:
        """The groups that changed after a mark; a read after this call shows the changes."""
        return self._recent.since(mark)

    def read(self, look: Callable[[Records], T]) -> T:
        """The result of `look` in one snapshot; `look` must copy its result."""
        return self.environment.read(look)

    def stats(self) -> pool_pb2.GetPoolStatsResponse:
        """Counts and sizes."""

        def count(records: Records) -> dict[Table, int]:
            return {table: records.count(table) for table in Table}

        counts, moved = self.environment.read(
            lambda records: (count(records), moved_groups(records))
        )
        return pool_pb2.GetPoolStatsResponse(
            pool_shard=self.shard,
            groups=counts[Table.GROUPS] - moved,
            trajectories=counts[Table.TRAJECTORIES],
            turns=counts[Table.TURNS],
            used_bytes=self.environment.used_bytes,
            map_bytes=self.environment.map_bytes,
            disk_free_bytes=self.environment.disk_free_bytes,
            live_bytes=self.environment.live_bytes,
        )

    def close(self) -> None:
        """Waits for readers, then closes the files."""
        self.environment.close()


_APPLY: Mapping[type[Any], Callable[[Records, Any], Any]] = {
    AppendTurns: lambda records, command: store_turns(records, command.turns),
    AppendRewards: append_rewards,
    SealTrajectory: seal,
    PutGroups: put_groups,
    SetGroupStates: set_group_states,
    FreeGroups: free,
    MarkOrphans: mark,
    EraseTasks: erase,
    NoteErasures: lambda records, command: note_erasures(records, command.entries),
    MarkMoved: mark_moved,
    DiscardCopy: discard_copy,
    StageRecords: stage_records,
    ImportGroup: import_group,
    FollowLeader: lambda records, command: follow(records, command.steps),
    RepairUnit: repair_from_replica,
    MendIndex: mend,
}
"""By type of command."""


def _apply(command: Command, records: Records) -> Any:
    """Applies `command` in the transaction of `records`. Returns the answer, or the ForgeError that
    refused it, so that other commands of the transaction are still applied."""
    try:
        return _APPLY[type(command)](records, command)
    except ForgeError as error:
        return error


def _settle_names(records: Records, wanted: str) -> str:
    """The shard's name; generates it and a lineage if there is none."""
    if not records.meta_text(LINEAGE_KEY):
        # Replicas of earlier releases have one in their own state only.
        drawn = replica_state(records).lineage or uuid.uuid4().hex
        records.put(Table.META, LINEAGE_KEY, drawn.encode())
    name = records.meta_text(SHARD_KEY)
    if not name:
        name = wanted or f"shard-{uuid.uuid4().hex[:8]}"
        records.put(Table.META, SHARD_KEY, name.encode())
        return name
    if wanted not in ("", name):
        raise ConfigError(
            f"shard {wanted!r} is set, but data_dir holds shard {name!r}: "
            "leave shard empty, or give another data_dir"
        )
    return name
