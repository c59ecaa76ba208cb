"""Lists of trajectories: the newest that match a filter, and the rollouts of one task."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from forge.client.group_credit import turn_advantages
from forge.client.stored.pool import PoolReader
from forge.core.errors import InvalidArgument, NotFound
from forge.core.trajectory import check_task_id, parse_trajectory_id
from forge.v1 import common_pb2 as pb
from forge.v1 import pool_pb2
from services.console.data.trajectories.rows import summary_row

MOST = 200
"""Trajectories of a list."""
PAGE = 500
MOST_PAGES = 20
"""Pages of one look at the pool, which ends there."""
LOOKS_BACK_S = (60.0, 600.0, 3600.0, 86_400.0, None)
"""Times back from now, until there are enough trajectories; None: all."""
PROBED_ROLLOUTS = 64
PROBED_ATTEMPTS = 4
"""Ids that are looked up for a task together, until none is known."""
MOST_ROLLOUTS = 1024
MOST_MATCHES = 50
"""Trajectories after which an answer of a search ends; the next one continues."""
SEARCH_S = 10.0
"""Time after which it ends, too: the pool reads all messages that the filter leaves."""
TEXT_FIELDS = ("domain", "reward_name", "tag", "scaffold", "user")
STATES = {
    "": pb.TRAJECTORY_STATE_UNSPECIFIED,
    "open": pb.TRAJECTORY_STATE_OPEN,
    "sealed": pb.TRAJECTORY_STATE_SEALED,
    "abandoned": pb.TRAJECTORY_STATE_ABANDONED,
}


def filter_of(query: Mapping[str, str]) -> pool_pb2.TrajectoryFilter:
    """The filter of a request. Raises `InvalidArgument`."""
    state = query.get("state", "")
    if state not in STATES:
        raise InvalidArgument(f"state {state[:20]!r} must be open, sealed or abandoned")

    def number(name: str, kind: Callable[[str], Any]) -> Any:
        text = query.get(name, "")
        try:
            return kind(text) if text else None
        except ValueError:
            raise InvalidArgument(f"{name} = {text[:40]!r} must be a number") from None

    wanted = pool_pb2.TrajectoryFilter(state=STATES[state])
    for name in TEXT_FIELDS:
        setattr(wanted, name, query.get(name, "").strip())
    for fact in filter(None, (one.strip() for one in query.get("where", "").split(","))):
        key, equals, value = fact.partition("=")
        if not (key and equals):
            raise InvalidArgument(f"where {fact[:80]!r} must be KEY=VALUE, or several with commas")
        wanted.metadata[key.strip()] = value.strip()
    try:
        wanted.MergeFrom(
            pool_pb2.TrajectoryFilter(
                min_reward=number("min_reward", float),
                max_reward=number("max_reward", float),
                min_weight_version=number("min_version", int),
                max_weight_version=number("max_version", int),
            )
        )
    except ValueError as error:
        # An int32 of more digits.
        raise InvalidArgument(str(error)) from None
    return wanted


def whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    """A number of a request, at least 0. Raises `InvalidArgument`."""
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise InvalidArgument(f"{name} = {text[:40]!r} must be a whole number of at least 0")
    return int(text)


@dataclass(eq=False, slots=True)
class TrajectoryList:
    """Reads lists from every pool shard."""

    reader: PoolReader
    _: KW_ONLY
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic

    async def newest(self, wanted: pool_pb2.TrajectoryFilter) -> dict[str, Any]:
        """The matching trajectories that closed last, newest first; of open ones any."""
        is_open = wanted.state == pb.TRAJECTORY_STATE_OPEN
        # An index finds labels in all time at once.
        labelled = bool(wanted.tag or wanted.scaffold or wanted.user or wanted.metadata)
        found: list[pb.TrajectorySummary] = []
        damaged: list[str] = []
        complete = True
        for back_s in (None,) if is_open or labelled else LOOKS_BACK_S:
            if back_s is not None or not (is_open or labelled):
                wanted.closed_from_unix_s = self.clock() - back_s if back_s else 0.0
            now, damaged, complete = await self._look(wanted)
            if complete or not found:
                found = now
            if len(found) >= MOST or not complete:
                break
        rows = [summary_row(one) for one in found]
        return {"rows": rows, "damaged": damaged, "complete": complete and len(found) < MOST}

    async def search(
        self, wanted: pool_pb2.TrajectoryFilter, text: str, *, after: str
    ) -> dict[str, Any]:
        """Trajectories that match and have a text in a message, in the pool's order. `after`:
        `next` of the answer before, or ""; the last answer has none. Raises `InvalidArgument`."""
        rows: list[dict[str, Any]] = []
        damaged: list[str] = []
        freed = 0
        last = after
        began_s = self.monotonic()
        shard, _, token = after.partition("/")
        async for name, page in self.reader.search(
            wanted, text, page_size=MOST_MATCHES, start=(shard, token)
        ):
            rows += [
                summary_row(one.trajectory) | {"turn": one.turn_index, "excerpt": one.excerpt}
                for one in page.matches
            ]
            damaged += page.damaged_trajectory_ids
            freed += page.freed_trajectories
            last = f"{name}/{page.next_page_token}"
            if len(rows) >= MOST_MATCHES or self.monotonic() - began_s > SEARCH_S:
                break
        else:
            last = ""
        return {"rows": rows, "damaged": damaged[:MOST], "freed": freed, "next": last}

    async def _look(
        self, wanted: pool_pb2.TrajectoryFilter
    ) -> tuple[list[pb.TrajectorySummary], list[str], bool]:
        """The newest since a time, ids of damaged ones, and whether all of that time was read."""
        newest: list[tuple[float, str, pb.TrajectorySummary]] = []
        damaged: list[str] = []
        pages, complete = 0, True
        async for page in self.reader.query(wanted, page_size=PAGE):
            if pages == MOST_PAGES:
                complete = False
                break
            pages += 1
            damaged += page.damaged
            for one in page.trajectories:
                heapq.heappush(newest, (one.sealed_unix_s, one.trajectory_id, one))
                if len(newest) > MOST:
                    heapq.heappop(newest)
        return [one for _, _, one in sorted(newest, reverse=True)], damaged[:MOST], complete

    async def rollouts(self, task_id: str) -> list[pb.TrajectorySummary]:
        """The trajectories of one task, by rollout and attempt. Raises `NotFound` without any."""
        check_task_id(task_id)
        found: list[pb.TrajectorySummary] = []
        for first in range(0, MOST_ROLLOUTS, PROBED_ROLLOUTS):
            ids = [
                f"{task_id}:{rollout}:{attempt}"
                for rollout in range(first, first + PROBED_ROLLOUTS)
                for attempt in range(PROBED_ATTEMPTS)
            ]
            known = await self.reader.summaries(ids)
            found += known
            if not known:
                break
        if not found:
            raise NotFound(f"no pool shard has a trajectory of task {task_id}")
        return sorted(found, key=lambda one: _place(one.trajectory_id))

    async def group(self, task_id: str) -> dict[str, Any]:
        """The rollouts of one task with the advantages of their turns."""
        found = await self.rollouts(task_id)
        credit = turn_advantages(found)
        rows = [summary_row(one) | {"advantages": credit.get(one.trajectory_id)} for one in found]
        return {"task_id": task_id, "rows": rows}

    async def advantages(self, trajectory_id: str) -> Sequence[float] | None:
        """Advantages of the turns of one trajectory; None if it has none."""
        task_id = parse_trajectory_id(trajectory_id).task_id
        return turn_advantages(await self.rollouts(task_id)).get(trajectory_id)


def _place(trajectory_id: str) -> tuple[int, int]:
    name = parse_trajectory_id(trajectory_id)
    return name.rollout_index, name.attempt
