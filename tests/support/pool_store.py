"""A store spoken to as the writer does: one command, one commit."""

from __future__ import annotations

from typing import Any

from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2
from services.pool import validation
from services.pool.commands import AppendTurns, Command
from services.pool.store import PoolStore

SEALED = common_pb2.TRAJECTORY_STATE_SEALED
ABANDONED = common_pb2.TRAJECTORY_STATE_ABANDONED


def commit(store: PoolStore, command: Command) -> Any:
    """The answer to one command; raises the error it was refused with."""
    (answer,) = store.commit([command])
    if isinstance(answer, Exception):
        raise answer
    return answer


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


def queued(store: PoolStore) -> list[str]:
    """Task ids in queue order."""
    return [response.group.task.task_id for response in store.groups().groups]
