"""Checks of requests that need no state of the queue.

Each function raises InvalidArgument with a message that names the field and the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forge.core.errors import InvalidArgument
from forge.core.queue.activity import Activity
from forge.core.queue.dispatch.failures import FailureKind
from forge.core.queue.groups import Abilities
from forge.core.tasks.validation import check_task_fields
from forge.core.trajectory import check_task_id, parse_trajectory_id
from forge.runtime.files.json_lines import parsed_json
from forge.v1 import common_pb2, scheduler_pb2

MAX_TAG_BYTES = 200
MAX_ERROR_CHARS = 1000
"""Longest error of an attempt; a longer one is cut."""
MAX_ROLLOUTS = 1024
"""Most rollouts of one LeaseRollouts call."""
MAX_DECLARED = 4096
"""Most domains, and most scaffolds, that a runner declares."""
MAX_POSITIONS = 16_384
"""Most positions of one GetQueue call, and with details."""
MAX_DETAILED = 64
MAX_GROUPS = 4096
"""Most groups of one batch."""

ACTIVITIES = {
    scheduler_pb2.ACTIVITY_RUNNING: Activity.RUNNING,
    scheduler_pb2.ACTIVITY_PAUSED: Activity.PAUSED,
    scheduler_pb2.ACTIVITY_DRAINING: Activity.DRAINING,
}


def check_tasks(
    tasks: Sequence[common_pb2.Task], *, max_group_size: int
) -> dict[str, common_pb2.Task]:
    """The tasks to store, by id; equal duplicates in a request count once."""
    checked: dict[str, common_pb2.Task] = {}
    for number, task in enumerate(tasks):
        try:
            stored = _check_task(task, max_group_size)
        except InvalidArgument as error:
            raise InvalidArgument(f"tasks[{number}]: {error}") from None
        if checked.setdefault(task.task_id, stored) != stored:
            raise InvalidArgument(
                f"tasks[{number}]: task_id {task.task_id!r} is twice in this request, with "
                "different content"
            )
    return checked


def _check_task(task: common_pb2.Task, max_group_size: int) -> common_pb2.Task:
    check_task_id(task.task_id)
    if not 1 <= task.group_size <= max_group_size:
        raise InvalidArgument(
            f"task {task.task_id}: group_size {task.group_size} must be 1 to {max_group_size}"
        )
    try:
        check_task_fields(task)
    except InvalidArgument as error:
        raise InvalidArgument(f"task {task.task_id}: {error}") from None
    if len(task.tag.encode()) > MAX_TAG_BYTES:
        raise InvalidArgument(
            f"task {task.task_id}: tag {task.tag[:40]!r}... has more than {MAX_TAG_BYTES} bytes"
        )
    if task.purpose not in common_pb2.Purpose.values():
        raise InvalidArgument(f"task {task.task_id}: purpose {task.purpose} is unknown")
    if task.sampling not in common_pb2.SamplingPolicy.values():
        raise InvalidArgument(f"task {task.task_id}: sampling {task.sampling} is unknown")
    _check_payload(task)
    if task.purpose:
        return task
    stored = common_pb2.Task()
    stored.CopyFrom(task)
    stored.purpose = common_pb2.PURPOSE_TRAIN
    return stored


def _check_payload(task: common_pb2.Task) -> None:
    shown = repr(task.payload_json[:40])
    place = f"task {task.task_id}: payload_json {shown}"
    if not isinstance(parsed_json(task.payload_json, place), dict):
        raise InvalidArgument(f"{place} is not a JSON object")


def check_wait_s(wait_s: float, *, max_wait_s: float) -> float:
    """The wait, at most `max_wait_s`."""
    if not (math.isfinite(wait_s) and wait_s >= 0):
        raise InvalidArgument(f"wait_s {wait_s} must be a number of seconds from 0 up")
    return min(wait_s, max_wait_s)


def check_count(field: str, value: int, *, most: int) -> int:
    """1 to `most`."""
    if not 1 <= value <= most:
        raise InvalidArgument(f"{field} {value} must be 1 to {most}")
    return value


def check_abilities(request: scheduler_pb2.LeaseRolloutsRequest) -> Abilities:
    """The declaration of a runner."""
    for field, names in (("domains", request.domains), ("scaffolds", request.scaffolds)):
        if len(names) > MAX_DECLARED:
            raise InvalidArgument(f"{field} has {len(names)} names, at most {MAX_DECLARED}")
    return Abilities(domains=frozenset(request.domains), scaffolds=frozenset(request.scaffolds))


def check_drop(request: scheduler_pb2.DropGroupsRequest) -> scheduler_pb2.DropGroupsRequest:
    """Task ids or a domain, and a reason."""
    if not 1 <= len(request.reason.encode()) <= MAX_TAG_BYTES:
        raise InvalidArgument(
            f"reason {request.reason[:40]!r} must have 1 to {MAX_TAG_BYTES} bytes"
        )
    if bool(request.task_ids) == bool(request.domain or request.scaffold):
        raise InvalidArgument("set either task_ids, or a domain and perhaps a scaffold")
    if request.scaffold and not request.domain:
        raise InvalidArgument(f"scaffold {request.scaffold!r} needs a domain")
    return request


def check_id(field: str, value: str) -> str:
    """A `runner_id`, `trainer_id` or `batch_id`."""
    if not 1 <= len(value) <= 200:
        raise InvalidArgument(f"{field} {value[:40]!r} must have 1 to 200 characters")
    return value


def check_step(step: int) -> int:
    """An optimizer step, from 1."""
    if step < 1:
        raise InvalidArgument(f"step {step} must be at least 1: steps are counted from 1")
    return step


def check_result(result: scheduler_pb2.FinishRolloutsRequest.Outcome, number: int) -> str:
    """Returns the trajectory id of a rollout result; the lease has the same id."""
    try:
        parse_trajectory_id(result.trajectory_id)
    except InvalidArgument as error:
        raise InvalidArgument(f"outcomes[{number}]: {error}") from None
    if result.lease_id not in ("", result.trajectory_id):
        raise InvalidArgument(
            f"outcomes[{number}]: lease_id {result.lease_id[:240]!r} is not the lease of "
            f"trajectory_id {result.trajectory_id!r}"
        )
    return result.trajectory_id


def failure_kind(kind: scheduler_pb2.FailureKind.ValueType) -> FailureKind:
    """The kind of an outcome; TASK if it is unset or unknown."""
    infrastructure = kind == scheduler_pb2.FAILURE_KIND_INFRASTRUCTURE
    return FailureKind.INFRASTRUCTURE if infrastructure else FailureKind.TASK


def check_activity(activity: scheduler_pb2.Activity.ValueType) -> Activity:
    """A known activity."""
    try:
        return ACTIVITIES[activity]
    except KeyError:
        raise InvalidArgument(
            f"activity {activity} must be one of {', '.join(Activity.__members__)}"
        ) from None
