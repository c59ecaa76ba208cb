"""Tasks and data sets: which tasks, by domain and by data set, their counts and rewards."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from forge.client.operator import Operator
from forge.client.reward_events import reward_sum
from forge.client.stored.pool import PoolReader
from forge.core.enum_words import enum_word
from forge.core.tasks.dataset_cursor import any_place_of
from forge.v1 import common_pb2 as pb
from forge.v1 import pool_pb2, scheduler_pb2

MOST_GROUPS = 5000
"""Groups whose data sets are rows: those that were queued last."""
MOST_TASKS = 500
"""Tasks of a data set's page: those that were queued last."""
MOST_HELD_OUT = 40
"""Sets of held-out tasks: one for each evaluation."""


class TasksView:
    """Reads the groups of the scheduler, and the counts of every pool shard."""

    def __init__(self, operator: Operator, reader: PoolReader) -> None:
        self._operator = operator
        self._reader = reader

    async def read(self) -> dict[str, Any]:
        """Domains and data sets. Earlier groups count in the domains alone."""
        status, (groups, complete), stats = await asyncio.gather(
            self._operator.scheduler_status(),
            self._operator.newest_groups("", most=MOST_GROUPS),
            self._stats(),
        )
        rows = data_set_rows(groups)
        held_out = [one for one in rows if one["held_out"]]
        return {
            "domains": domain_rows(status, stats),
            "data_sets": [one for one in rows if not one["held_out"]],
            "held_out": held_out[-MOST_HELD_OUT:],
            "complete": complete,
        }

    async def data_set(self, tag: str) -> dict[str, Any]:
        """The tasks of one data set, the last ones first."""
        # Without a tag the scheduler lists the groups of every tag.
        most = MOST_TASKS if tag else MOST_GROUPS
        groups, complete = await self._operator.newest_groups(tag, most=most)
        groups = [one for one in groups if one.group.task.tag == tag]
        groups.sort(key=lambda one: one.group.queue_index, reverse=True)
        return {
            "tag": tag,
            "tasks": [task_row(one) for one in groups[:MOST_TASKS]],
            "complete": complete and len(groups) <= MOST_TASKS,
        }

    async def _stats(self) -> list[pool_pb2.GetPoolStatsResponse]:
        shards = await self._reader.shards()
        return list(await asyncio.gather(*(self._reader.stats(shard) for shard in shards)))


def domain_rows(
    status: scheduler_pb2.GetSchedulerStatusResponse,
    stats: Iterable[pool_pb2.GetPoolStatsResponse],
) -> list[dict[str, Any]]:
    """Each domain with its share, and the groups and trajectories of all shards."""
    groups: defaultdict[str, Counter[str]] = defaultdict(Counter)
    held_out: Counter[str] = Counter()
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for shard in stats:
        for count in shard.group_counts:
            state = enum_word(pb.GroupState, count.state)
            if count.purpose == pb.PURPOSE_EVAL:
                held_out[count.domain] += count.groups
            else:
                groups[count.domain][state] += count.groups
        for part in shard.trajectory_counts:
            state = enum_word(pb.TrajectoryState, part.state)
            totals[part.domain][state] += part.trajectories
            totals[part.domain]["turns"] += part.turns
            totals[part.domain]["sampled_tokens"] += part.sampled_tokens
    known = {one.domain: one for one in status.domains}
    # Open trajectories have no domain yet.
    names = sorted({*groups, *held_out, *totals, *known} - {""})
    return [
        {
            "domain": name,
            "share": known[name].share if name in known else None,
            "recent_reward": known[name].recent_reward
            if name in known and known[name].completed_rollouts
            else None,
            "groups": dict(groups[name]),
            "held_out_groups": held_out[name],
            "sealed": totals[name]["sealed"],
            "abandoned": totals[name]["abandoned"],
            "turns": totals[name]["turns"],
            "sampled_tokens": totals[name]["sampled_tokens"],
        }
        for name in names
    ]


def data_set_rows(groups: Sequence[scheduler_pb2.BatchGroup]) -> list[dict[str, Any]]:
    """One row for each tag and purpose, by the queue position of its newest group."""
    members: defaultdict[tuple[bool, str], list[scheduler_pb2.BatchGroup]] = defaultdict(list)
    for one in groups:
        task = one.group.task
        members[task.purpose == pb.PURPOSE_EVAL, task.tag].append(one)
    found = []
    for (held_out, tag), own in members.items():
        places = [any_place_of(one.group.task.task_id) for one in own]
        known = [place for place in places if place is not None]
        found.append(
            {
                "tag": tag,
                "held_out": held_out,
                "domains": sorted({one.group.task.domain for one in own}),
                "scaffolds": sorted({one.group.task.scaffold for one in own}),
                "groups": len(own),
                # Of a file: its rows, each once an epoch.
                "rows": len({place.row for place in known}) if len(known) == len(own) else None,
                "epochs": max(place.epoch for place in known) + 1
                if known and len(known) == len(own)
                else None,
                "phases": dict(Counter(one.phase for one in own)),
                "rollouts": sum(len(one.trajectories) for one in own),
                "mean_outcome": _mean(outcome for one in own for outcome in _outcomes(one)),
                "newest": max(one.group.queue_index for one in own),
            }
        )
    return sorted(found, key=lambda row: (row["newest"], row["tag"]))


def task_row(one: scheduler_pb2.BatchGroup) -> dict[str, Any]:
    """One task."""
    task = one.group.task
    outcomes = _outcomes(one)
    return {
        "task_id": task.task_id,
        "domain": task.domain,
        "scaffold": task.scaffold,
        "phase": one.phase,
        "step": one.group.step,
        "reason": one.group.reason,
        "rollouts": len(one.trajectories),
        "group_size": task.group_size,
        "outcomes": outcomes,
        "mean_outcome": _mean(outcomes),
        "metadata": dict(task.metadata),
    }


def _outcomes(one: scheduler_pb2.BatchGroup) -> list[float]:
    """The outcome of each rollout that has one."""
    sums = (reward_sum(trajectory.rewards) for trajectory in one.trajectories)
    return [outcome for outcome in sums if outcome is not None]


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
