"""The open batch: complete groups that are assigned to the next batch.

Owns these groups, and the complete ones that may be assigned next. `forge.core.queue.window.window`
decides the assignment. A lane is a domain with a share, or all other domains.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from itertools import islice

from forge.core.queue.groups import Group


class Filling:
    """Assigned groups by lane and queue index."""

    def __init__(self) -> None:
        self._lane_of: dict[int, str] = {}
        self._lanes: defaultdict[str, dict[int, Group]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._lane_of)

    def __iter__(self) -> Iterator[Group]:
        """In queue order."""
        for index in sorted(self._lane_of):
            yield self._lanes[self._lane_of[index]][index]

    @property
    def indices(self) -> KeysView[int]:
        """Queue indices of assigned groups."""
        return self._lane_of.keys()

    def extend(self, lane: str, indices: Sequence[int], groups: Iterable[Group]) -> None:
        """Assign groups of one lane, with their indices."""
        self._lane_of.update(dict.fromkeys(indices, lane))
        self._lanes[lane].update(zip(indices, groups, strict=True))

    def discard(self, groups: Iterable[Group]) -> list[Group]:
        """Remove groups; those that were not assigned."""
        others: list[Group] = []
        for group in groups:
            index = group.spec.index
            lane = self._lane_of.pop(index, None)
            if lane is None:
                others.append(group)
            else:
                del self._lanes[lane][index]
        return others

    def clear(self) -> None:
        """Remove all groups."""
        self._lane_of.clear()
        self._lanes.clear()

    def usable(self, lane: str, away: frozenset[str]) -> int:
        """Groups of a lane that are not on the pool shards `away`."""
        groups = self._lanes[lane]
        if not away:
            return len(groups)
        return sum(group.spec.shard not in away for group in groups.values())

    def usable_of_all(self, away: frozenset[str]) -> int:
        """`usable` over all lanes."""
        if not away:
            return len(self._lane_of)
        return sum(self.usable(lane, away) for lane in self._lanes)

    def pick(self, size: int, quotas: Mapping[str, int], away: frozenset[str]) -> list[Group]:
        """At most `size` groups in queue order: the oldest of each lane up to its quota, then the
        oldest others."""
        if not away and len(self) <= size:
            return list(self)
        picked: list[int] = []
        spare: list[int] = []
        for lane, groups in self._lanes.items():
            order = sorted(i for i in groups if groups[i].spec.shard not in away)
            quota = quotas.get(lane, 0)
            picked += order[:quota]
            spare += order[quota:]
        if missing := size - len(picked):
            picked += sorted(spare)[:missing]
        picked.sort()
        return [self._lanes[self._lane_of[index]][index] for index in picked]


class CompleteGroups:
    """Sorted indices of complete groups that are not assigned, by lane."""

    def __init__(self) -> None:
        self._lanes: defaultdict[str, list[int]] = defaultdict(list)

    def __iter__(self) -> Iterator[str]:
        """The lanes."""
        return iter(self._lanes)

    def add(self, lane: str, index: int) -> None:
        """Add an index."""
        order = self._lanes[lane]
        if not order or order[-1] < index:
            # A group that just joined the window has the highest index.
            order.append(index)
        else:
            insort(order, index)

    def discard(self, lane: str, index: int) -> None:
        """Remove an index, if present."""
        order = self._lanes[lane]
        at = bisect_left(order, index)
        if at < len(order) and order[at] == index:
            del order[at]

    def oldest(
        self, lane: str, limit: int, usable: Callable[[int], bool] | None = None
    ) -> list[int]:
        """Up to `limit` usable indices of a lane, in queue order; none if it is negative."""
        order, most = self._lanes[lane], max(limit, 0)
        return order[:most] if usable is None else list(islice(filter(usable, order), most))

    def remove(self, lane: str, indices: Sequence[int]) -> None:
        """Remove what `oldest` returned."""
        order = self._lanes[lane]
        if order[: len(indices)] == indices:
            del order[: len(indices)]
        else:
            gone = set(indices)
            order[:] = [index for index in order if index not in gone]

    def clear(self) -> None:
        """Remove all indices."""
        self._lanes.clear()
