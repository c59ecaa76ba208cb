"""What a scheduler's term keeps of groups that are over, and how long it takes to read them.

Groups of eight sealed rollouts that were trained on, as a pool shard tells them at an election, are
taken apart and put into a term, in one process. The pool's part of a scan is not in it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

from benchmarks.support.cpu import rss_bytes
from forge.core.queue.admission import QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.state import TermState
from services.scheduler.stored import stored_group

ROLLOUTS = 8
BATCH_GROUPS = 512
PART_GROUPS = 1000
"""Restored at once, as a leader does."""


def measure_settled(groups: int) -> dict[str, float]:
    """Bytes that each group beyond the first half adds, and CPU seconds for 100,000 groups."""
    state = TermState(GenerationQueue(QueueSettings(concurrency=8)), max_pending=1)
    gc.disable()
    half_bytes, rebuild_s = 0, 0.0
    for start in range(0, groups, PART_GROUPS):
        if not half_bytes and start >= groups // 2:
            half_bytes = rss_bytes(os.getpid())
        told = list(_told(start, PART_GROUPS))
        started_s = time.process_time()
        responses = map(pool_pb2.ScanGroupsResponse.FromString, told)
        state.restore(map(stored_group, responses), now_s=0.0)
        rebuild_s += time.process_time() - started_s
    gc.enable()
    grown_bytes = rss_bytes(os.getpid()) - half_bytes
    assert state.queue.books.status().trained == groups
    return {
        "settled_groups": groups,
        "bytes_per_settled_group": grown_bytes / (groups - groups // 2),
        "rebuild_cpu_s_per_100k": rebuild_s * 100_000 / groups,
    }


def _told(start: int, count: int) -> Iterator[bytes]:
    for index in range(start, start + count):
        step = index // BATCH_GROUPS + 1
        task_id = f"math-train-{index:08d}"
        response = pool_pb2.ScanGroupsResponse()
        response.group.CopyFrom(
            common_pb2.GroupRecord(
                task=common_pb2.Task(
                    task_id=task_id,
                    domain="math",
                    scaffold="blackbox",
                    group_size=ROLLOUTS,
                    purpose=common_pb2.PURPOSE_TRAIN,
                ),
                queue_index=index,
                state=common_pb2.GROUP_STATE_TRAINED,
                batch_id=f"batch-0-{step}",
                step=step,
                pool_shard="s0",
                task_digest=index.to_bytes(16, "little"),
            )
        )
        for rollout in range(ROLLOUTS):
            trajectory = response.trajectories.add(
                trajectory_id=f"{task_id}:{rollout}:0",
                state=common_pb2.TRAJECTORY_STATE_SEALED,
                sealed_unix_s=1e9 + index,
            )
            trajectory.rewards.add(
                name="outcome", kind=common_pb2.REWARD_KIND_OUTCOME, value=rollout % 2
            )
        yield response.SerializeToString()
