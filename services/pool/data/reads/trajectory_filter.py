"""Filters of trajectories: their rules, and whether a trajectory fits.

Header and rewards decide about most conditions; the record of its group about labels.
"""

from __future__ import annotations

import math

from forge.core.errors import InvalidArgument
from forge.core.tasks.validation import check_metadata
from forge.core.trajectory import check_task_id
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.summaries import summary_of
from services.pool.storage.groups.group_records import group_record
from services.pool.storage.groups.labels import has_labels, label_prefixes
from services.pool.storage.groups.moved_groups import is_moved
from services.pool.storage.keys import name_of_trajectory_key
from services.pool.storage.records import Records, TrajectoryHeader

MAX_TASKS = 1000
"""Most tasks of a filter."""


def check_filter(wanted: pool_pb2.TrajectoryFilter) -> pool_pb2.TrajectoryFilter:
    """Returns `wanted`; raises `InvalidArgument` if nothing can fit it."""
    if wanted.state not in common_pb2.TrajectoryState.values():
        raise InvalidArgument(f"filter.state {wanted.state} is unknown")
    if len(wanted.task_ids) > MAX_TASKS:
        raise InvalidArgument(f"filter.task_ids has {len(wanted.task_ids)}, at most {MAX_TASKS}")
    for task_id in wanted.task_ids:
        check_task_id(task_id)
    check_metadata(wanted.metadata, name="filter.metadata")
    for low, high in (
        ("min_reward", "max_reward"),
        ("min_weight_version", "max_weight_version"),
        ("closed_from_unix_s", "closed_before_unix_s"),
    ):
        bounds = [
            (name, getattr(wanted, name))
            for name in (low, high)
            if wanted.HasField(name)  # type: ignore[arg-type]
        ]
        for name, value in bounds:
            if value != value:
                raise InvalidArgument(f"filter.{name} is not a number")
        if len(bounds) == 2 and bounds[0][1] > bounds[1][1]:
            raise InvalidArgument(
                f"filter.{low} {bounds[0][1]:g} is above filter.{high} {bounds[1][1]:g}"
            )
    if wanted.state == common_pb2.TRAJECTORY_STATE_OPEN:
        for name in ("domain", "closed_from_unix_s", "closed_before_unix_s"):
            if any(field.name == name for field, _ in wanted.ListFields()):
                raise InvalidArgument(f"filter.{name} is set, which no open trajectory has")
    return wanted


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
