"""Whether a trajectory fits a filter; `forge.client.stored.filters` owns the rules of filters.

Header and rewards decide about most conditions; the record of its group about labels.
"""

from __future__ import annotations

import math

from forge.v1 import common_pb2, pool_pb2
from services.pool.data.summaries import summary_of
from services.pool.storage.groups.group_records import group_record
from services.pool.storage.groups.labels import has_labels, label_prefixes
from services.pool.storage.groups.moved_groups import is_moved
from services.pool.storage.keys import name_of_trajectory_key
from services.pool.storage.records import Records, TrajectoryHeader


def summary_if_fits(
    records: Records,
    wanted: pool_pb2.TrajectoryFilter,
    trajectory: bytes,
    header: TrajectoryHeader,
) -> common_pb2.TrajectorySummary | None:
    """None if it does not fit, and if its group moved to another shard; the turns of an open one
    are counted in `header`."""
    name = name_of_trajectory_key(trajectory)
    if wanted.task_ids and name.task_id not in wanted.task_ids:
        return None
    if not fits_header(wanted, header) or is_moved(records, name.task_id):
        return None
    if label_prefixes(wanted):
        # The record decides: a trajectory without a group has no label.
        group = group_record(records, name.task_id)
        if group is None or not has_labels(group.task, wanted):
            return None
    summary = summary_of(records, name, header)
    return summary if _fits_rewards(wanted, summary) else None


def fits_header(
    wanted: pool_pb2.TrajectoryFilter, header: TrajectoryHeader, *, counted: bool = True
) -> bool:
    """Whether a header fits; without `counted`, its counts are ignored."""
    if wanted.state and header.state != wanted.state:
        return False
    if wanted.domain and header.domain != wanted.domain:
        return False
    if wanted.HasField("closed_from_unix_s") and (
        header.is_open or header.sealed_unix_s < wanted.closed_from_unix_s
    ):
        return False
    if wanted.HasField("closed_before_unix_s") and (
        header.is_open or header.sealed_unix_s >= wanted.closed_before_unix_s
    ):
        return False
    return not counted or _fits_versions(wanted, header)


def _fits_versions(wanted: pool_pb2.TrajectoryFilter, header: TrajectoryHeader) -> bool:
    low = wanted.min_weight_version if wanted.HasField("min_weight_version") else -math.inf
    high = wanted.max_weight_version if wanted.HasField("max_weight_version") else math.inf
    if header.sampled_tokens == 0:
        return low == -math.inf and high == math.inf
    return low <= header.max_weight_version and header.min_weight_version <= high


def _fits_rewards(wanted: pool_pb2.TrajectoryFilter, summary: common_pb2.TrajectorySummary) -> bool:
    if not (wanted.HasField("min_reward") or wanted.HasField("max_reward")):
        return True
    name = wanted.reward_name
    values = [
        reward.value
        for reward in summary.rewards
        if (reward.name == name if name else reward.kind == common_pb2.REWARD_KIND_OUTCOME)
    ]
    low = wanted.min_reward if wanted.HasField("min_reward") else -math.inf
    high = wanted.max_reward if wanted.HasField("max_reward") else math.inf
    return bool(values) and low <= sum(values) <= high
