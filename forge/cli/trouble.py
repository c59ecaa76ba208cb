"""Lines about the scheduler's problems, for `forge run`, `forge status` and `forge queue`.

Owns the wording around the scheduler's texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge.v1 import scheduler_pb2


def troubles(status: scheduler_pb2.GetSchedulerStatusResponse | None) -> dict[str, str]:
    """Returns the reason of a stall and the unreachable pool shards: one line each, by identity.
    Empty without problems."""
    if status is None:
        return {}
    lines = {}
    if status.HasField("stall"):
        minutes = status.untrained_s / 60
        lines[f"stall {status.stall.cause}"] = (
            f"No group was trained for {minutes:.0f} min: {status.stall.text}"
        )
    if status.shards_away and status.stall.cause != "shard_away":
        names = ", ".join(status.shards_away)
        lines[f"unreachable {names}"] = (
            f"Unreachable: pool shard {names}. Its groups wait; training continues without them."
        )
    return lines


def tombstone_lines(reasons: Iterable[scheduler_pb2.TombstoneReason]) -> list[str]:
    """Returns one line for each reason, with a task as an example; the most frequent first."""
    ordered = sorted(reasons, key=lambda one: -one.groups)
    return [f"{one.groups} tombstoned: {one.reason} (task {one.task_id})" for one in ordered]


def queue_lines(status: scheduler_pb2.GetSchedulerStatusResponse) -> list[str]:
    """Returns the kinds of tasks that no runner declares, and the reasons of tombstones."""
    lines = [
        f"no runner declares: domain {one.domain}, scaffold {one.scaffold}"
        for one in status.unserved
    ]
    lines += tombstone_lines(status.tombstones)
    shown = sum(reason.groups for reason in status.tombstones)
    if shown < status.tombstoned:
        lines.append(f"{status.tombstoned - shown} tombstoned: earlier, or for rarer reasons")
    return lines
