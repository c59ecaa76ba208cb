"""The rules of a filter of trajectories, for the pool and for a client before it connects."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from forge.core.clocks import time_text
from forge.core.errors import InvalidArgument
from forge.core.tasks.validation import check_metadata
from forge.core.trajectory import check_task_id
from forge.v1 import common_pb2, pool_pb2

MAX_TASKS = 1000
"""Most tasks of a filter."""
_BOUNDS = (
    ("min_reward", "max_reward"),
    ("min_weight_version", "max_weight_version"),
    ("closed_from_unix_s", "closed_before_unix_s"),
)
_AS_FIELDS: Mapping[str, str] = MappingProxyType({})


def check_filter(
    wanted: pool_pb2.TrajectoryFilter, options: Mapping[str, str] = _AS_FIELDS
) -> pool_pb2.TrajectoryFilter:
    """Return `wanted`. Raises `InvalidArgument` if nothing can fit it; `options`: names of fields
    in the error, by default those of the message."""
    names = {name: f"filter.{name}" for name in wanted.DESCRIPTOR.fields_by_name} | dict(options)
    if wanted.state not in common_pb2.TrajectoryState.values():
        raise InvalidArgument(f"{names['state']} {wanted.state} is unknown")
    if len(wanted.task_ids) > MAX_TASKS:
        count = len(wanted.task_ids)
        raise InvalidArgument(f"{names['task_ids']} has {count}, at most {MAX_TASKS}")
    for task_id in wanted.task_ids:
        check_task_id(task_id)
    check_metadata(wanted.metadata, name=names["metadata"])
    for bounds in _BOUNDS:
        _check_bounds(wanted, bounds, names)
    if wanted.state == common_pb2.TRAJECTORY_STATE_OPEN:
        given = {field.name for field, _ in wanted.ListFields()}
        for name in ("domain", "closed_from_unix_s", "closed_before_unix_s"):
            if name in given:
                raise InvalidArgument(f"{names[name]} is set, which no open trajectory has")
    return wanted


def _check_bounds(
    wanted: pool_pb2.TrajectoryFilter, bounds: tuple[str, str], names: Mapping[str, str]
) -> None:
    given = {
        name: getattr(wanted, name)
        for name in bounds
        if wanted.HasField(name)  # type: ignore[arg-type]
    }
    for name, value in given.items():
        if value != value:
            raise InvalidArgument(f"{names[name]} is not a number")
    low, high = bounds
    if len(given) == 2 and given[low] > given[high]:
        shown = {name: _shown(name, value) for name, value in given.items()}
        raise InvalidArgument(f"{names[low]} {shown[low]} is above {names[high]} {shown[high]}")


def _shown(name: str, value: float) -> str:
    return time_text(value) if name.endswith("_unix_s") else f"{value:g}"
