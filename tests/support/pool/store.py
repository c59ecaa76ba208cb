"""A store spoken to as the writer does: one command, one commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2
from services.pool import validation
from services.pool.data.commands import AppendTurns, Command
from services.pool.data.reads.group_scan import PAGE_BYTES, PAGE_GROUPS, Scan
from services.pool.data.reads.reads import GroupPage, groups
from services.pool.maintenance.backup.backup import snapshot
from services.pool.maintenance.integrity import Checker
from services.pool.storage.records import Records
from services.pool.storage.tables import Table
from services.pool.store import PoolStore

SEALED = common_pb2.TRAJECTORY_STATE_SEALED
ABANDONED = common_pb2.TRAJECTORY_STATE_ABANDONED


def commit(store: PoolStore, command: Command) -> Any:
    """The answer to one command; raises the error it was refused with."""
    (answer,) = store.commit([command])
    if isinstance(answer, Exception):
        raise answer
    return answer


@dataclass
class Writer:
    """Commits each command at once."""

    store: PoolStore

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        return commit(self.store, message)


def append(store: PoolStore, *turns: common_pb2.Turn) -> None:
    new = tuple(validation.new_turn(turn.SerializeToString()) for turn in turns)
    for refused in commit(store, AppendTurns(turns=new)):
        if refused is not None:
            raise refused


def seal(
    store: PoolStore,
    trajectory_id: str = "task:0:0",
    *,
    turns: int = 1,
    state: common_pb2.TrajectoryState.ValueType = SEALED,
    rewards: Any = (),
    domain: str = "code",
    now_unix_s: float = 100.0,
    **more: Any,
) -> Any:
    request = pool_pb2.SealTrajectoryRequest(
        trajectory_id=trajectory_id,
        domain=domain,
        turns=turns,
        state=state,
        rewards=rewards,
        **more,
    )
    return commit(store, validation.seal_trajectory(request, now_unix_s=now_unix_s))


def reward(
    store: PoolStore, *rewards: common_pb2.RewardEvent, trajectory_id: str = "task:0:0"
) -> None:
    request = pool_pb2.AppendRewardsRequest(trajectory_id=trajectory_id, rewards=rewards)
    commit(store, validation.append_rewards(request))


def put_groups(store: PoolStore, *groups: common_pb2.GroupRecord, fence: int = 1) -> None:
    request = pool_pb2.PutGroupsRequest(groups=groups, fence=fence)
    commit(store, validation.put_groups(request, shard=store.shard))


def set_states(
    store: PoolStore,
    *changes: pool_pb2.SetGroupStatesRequest.Change,
    fence: int = 1,
    now_unix_s: float = 100.0,
) -> None:
    request = pool_pb2.SetGroupStatesRequest(changes=changes, fence=fence)
    commit(store, validation.set_group_states(request, now_unix_s=now_unix_s))


def change(
    task_id: str, state: common_pb2.GroupState.ValueType, **more: Any
) -> pool_pb2.SetGroupStatesRequest.Change:
    return pool_pb2.SetGroupStatesRequest.Change(task_id=task_id, state=state, **more)


def fetch(store: PoolStore, trajectory_id: str = "task:0:0") -> common_pb2.Trajectory:
    (stored,) = store.trajectories([parse_trajectory_id(trajectory_id)])
    return common_pb2.Trajectory.FromString(stored)


def summary(store: PoolStore, trajectory_id: str = "task:0:0") -> common_pb2.TrajectorySummary:
    (found,) = store.summaries([parse_trajectory_id(trajectory_id)])
    return found


def damage_of(store: PoolStore) -> list[str]:
    """Every damaged record and broken rule."""

    def look(records: Records) -> list[str]:
        checker = Checker(records._transaction, store.environment._databases)
        return [str(found) for found in checker.damage()]

    return store.read(look)


def groups_page(
    store: PoolStore,
    *,
    after: bytes = b"",
    limit: int = PAGE_GROUPS,
    limit_bytes: int = PAGE_BYTES,
    brief: bool = False,
) -> GroupPage:
    """A page of groups in queue order."""
    return store.read(
        lambda records: groups(
            records, after=after, limit=limit, limit_bytes=limit_bytes, brief=brief
        )
    )


def pages(scan: Scan) -> list[pool_pb2.ScanGroupsResponse]:
    """All that a scan returns."""
    found: list[pool_pb2.ScanGroupsResponse] = []
    while (page := scan.next_page()) is not None:
        found += page
    return found


def counted(
    settled: pool_pb2.SettledGroups,
) -> dict[tuple[int, int, str, str], tuple[int, int]]:
    """Groups and rollouts by purpose, state, domain and reason."""
    return {
        (row.purpose, row.state, row.domain, row.reason): (row.groups, row.rollouts)
        for row in settled.counts
    }


def is_left_out(group: common_pb2.GroupRecord, settled: pool_pb2.SettledGroups) -> bool:
    """Whether a bounded scan says so."""
    if group.state == common_pb2.GROUP_STATE_TRAINED:
        return 0 < group.step <= settled.left_out_step
    return 0 < group.settled_unix_s <= settled.left_out_unix_s


def queued(store: PoolStore) -> list[str]:
    """Task ids in queue order."""
    return [response.group.task.task_id for response in groups_page(store).groups]


def records_of(directory: Path) -> dict[Table, list[tuple[bytes, bytes]]]:
    """Every record of a shard as it lies on disk."""
    with snapshot(directory) as (transaction, databases):
        records = Records(transaction, databases)
        return {table: list(records.scan_checksummed(table)) for table in Table}


def as_version_4(records: Records) -> None:
    """Takes out of a shard what version 4 did not have."""
    records.clear(Table.LABELS)
    records.put(Table.META, b"schema_version", b"4")
