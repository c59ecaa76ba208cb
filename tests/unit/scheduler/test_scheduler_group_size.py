"""The largest group that the settings allow fits every message of the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import ConfigError
from forge.core.tasks.validation import MAX_GROUP_SIZE
from forge.runtime.rpc.channel import MAX_MESSAGE_BYTES
from forge.runtime.settings.reader import load
from forge.v1 import common_pb2, scheduler_pb2
from services.scheduler.config import SchedulerConfig
from services.scheduler.groups.batch_groups import fitting

HIGHEST = 2**32 - 1


def largest_group() -> scheduler_pb2.BatchGroup:
    """Every name has its full length, every number its largest value."""
    task_id = "t" * 200
    group = scheduler_pb2.BatchGroup(phase="tombstoned")
    group.group.task.task_id, group.group.task.group_size = task_id, MAX_GROUP_SIZE
    reward = common_pb2.RewardEvent(
        event_id="e" * 256, name="n" * 256, kind=common_pb2.REWARD_KIND_OUTCOME, value=0.5
    )
    for rollout in range(MAX_GROUP_SIZE):
        group.trajectories.add(
            trajectory_id=f"{task_id}:{HIGHEST - rollout}:{HIGHEST}",
            task_id=task_id,
            state=common_pb2.TRAJECTORY_STATE_SEALED,
            turns=HIGHEST,
            sampled_tokens=2**63,
            rewards=[reward] * 4,
            min_weight_version=-1,
            max_weight_version=-1,
            sealed_unix_s=1e9,
            reason="x" * 1000,
            domain="d" * 64,
            freed=True,
            prompt_tokens=2**63,
        )
    return group


def test_largest_group_fits_a_batch_and_a_list() -> None:
    """Without its rewards, which the trajectories have."""
    (group,) = fitting([largest_group()])
    batch = scheduler_pb2.LeaseBatchResponse(batch_id="b" * 200, groups=[group], lease_s=1e9)
    assert batch.ByteSize() < MAX_MESSAGE_BYTES
    assert scheduler_pb2.ListGroupsResponse(group=group).ByteSize() < MAX_MESSAGE_BYTES
    assert len(group.trajectories) == MAX_GROUP_SIZE


@pytest.mark.parametrize("size", [0, MAX_GROUP_SIZE + 1])
def test_a_bound_that_no_message_holds_is_refused(size: Any) -> None:
    """The error names the field, the value and the bound."""
    with pytest.raises(ConfigError, match=rf"max_group_size = .?{size}.*1 to {MAX_GROUP_SIZE}"):
        load(SchedulerConfig, service="scheduler", argv=[f"--max-group-size={size}"], environ={})
