"""Keys of the store: names as bytes in the order of a range scan.

A task id holds no colon and numbers have a fixed width, so no trajectory's key is a prefix of
another's: the records of a task, and of a trajectory, are adjacent and share one prefix.

    groups, states    task
    queue             purpose(u8) queue_index(u64) task
    trajectories      task ":" rollout(u32) attempt(u32)
    turns             task ":" rollout(u32) attempt(u32) turn(u32)
    rewards           task ":" rollout(u32) attempt(u32) event_id

Numbers are big-endian. The longest key is a reward's: 200 + 1 + 8 + MAX_EVENT_ID_BYTES, below
LMDB's 511 bytes.
"""

from __future__ import annotations

import struct

from forge.core.trajectory import TaskId, TrajectoryName
from forge.v1 import common_pb2

MAX_EVENT_ID_BYTES = 256
SHARD_KEY = b"shard"
"""In `meta`: the shard's name."""
LINEAGE_KEY = b"lineage"
"""In `meta`: drawn with the shard, and the same in every replica and copy of it."""

_QUEUE = struct.Struct(">BQ")
_NUMBERS = struct.Struct(">II")
_TURN = struct.Struct(">I")


def group_key(task_id: str) -> bytes:
    """Key of a group and of its state."""
    return task_id.encode()


def queue_key(purpose: int, queue_index: int, task_id: str) -> bytes:
    """Key of a group in the queue."""
    return _QUEUE.pack(purpose, queue_index) + task_id.encode()


def place_of_queue_key(key: bytes) -> tuple[common_pb2.Purpose.ValueType, int]:
    """Purpose and queue index."""
    purpose, queue_index = _QUEUE.unpack_from(key)
    return common_pb2.Purpose.ValueType(purpose), queue_index


def task_of_queue_key(key: bytes) -> TaskId:
    """Task of a queue entry."""
    return TaskId(task_key_of_queue_key(key).decode())


def task_key_of_queue_key(key: bytes) -> bytes:
    """Key of the group, even if a damaged one cannot be decoded."""
    return key[_QUEUE.size :]


def task_prefix(task_id: str) -> bytes:
    """Prefix of every trajectory of a task."""
    return task_id.encode() + b":"


def trajectory_key(name: TrajectoryName) -> bytes:
    """Also the prefix of every turn and reward of the trajectory."""
    return task_prefix(name.task_id) + _NUMBERS.pack(name.rollout_index, name.attempt)


def name_of_trajectory_key(key: bytes) -> TrajectoryName:
    """Name of a trajectory."""
    rollout_index, attempt = _NUMBERS.unpack(key[-_NUMBERS.size :])
    task_id = TaskId(key[: -_NUMBERS.size - 1].decode())
    return TrajectoryName(task_id=task_id, rollout_index=rollout_index, attempt=attempt)


def turn_key(trajectory: bytes, turn_index: int) -> bytes:
    """Key of a turn."""
    return trajectory + _TURN.pack(turn_index)


def trajectory_of_turn_key(key: bytes) -> bytes:
    """Key of a turn's trajectory."""
    return key[: -_TURN.size]


def index_of_turn_key(key: bytes) -> int:
    """Index of a turn."""
    index: int = _TURN.unpack(key[-_TURN.size :])[0]
    return index


def reward_key(trajectory: bytes, event_id: str) -> bytes:
    """Key of a reward."""
    return trajectory + event_id.encode()
