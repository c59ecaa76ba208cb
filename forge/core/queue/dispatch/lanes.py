"""One order over items on pool shards, some of them unreachable.

Each shard has a lane, a heap of its items; one heap orders the first items of all lanes. The cost
of the first item does not depend on the number of shards, and a shard that becomes unreachable or
returns costs one entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[float, int, int]


class Lanes(Generic[Item]):
    """Items by unique key, the lowest first."""

    def __init__(self, waits: Callable[[Item, str], bool]) -> None:
        """`waits`: whether an item is still valid on a shard; `first` drops others."""
        self._waits = waits
        self._lanes: defaultdict[str, list[tuple[Key, Item]]] = defaultdict(list)
        """By pool shard."""
        self._firsts: list[tuple[Key, str]] = []
        """Heap over the lanes: a key and a shard. Only the entry in `_listed` is valid; its key may
        be that of a dropped item."""
        self._listed: dict[str, Key] = {}
        """By shard, the key of its valid entry; absent for a lane that is empty or set aside."""
        self._aside: set[str] = set()
        """Shards that `first` skipped because they were unreachable."""
        self._away: frozenset[str] = frozenset()

    @property
    def empty(self) -> bool:
        """Whether no lane has an item; one that `first` has not dropped counts."""
        return not any(self._lanes.values())

    def push(self, shard: str, key: Key, item: Item) -> None:
        """Add an item."""
        heappush(self._lanes[shard], (key, item))
        listed = self._listed.get(shard)
        if shard not in self._aside and (listed is None or key < listed):
            self._list(shard, key)

    def first(self, away: frozenset[str]) -> tuple[Key, Item] | None:
        """Returns the lowest item on a shard that is not in `away`."""
        if away != self._away:
            self._bring_back(away)
        firsts = self._firsts
        while firsts:
            key, shard = firsts[0]
            if self._listed.get(shard) != key:
                heappop(firsts)
                continue
            lane = self._lanes[shard]
            if shard not in away:
                while lane and not self._waits(lane[0][1], shard):
                    heappop(lane)
            if not lane or shard in away:
                heappop(firsts)
                del self._listed[shard]
                if lane:
                    self._aside.add(shard)
            elif lane[0][0] != key:
                self._listed[shard] = lane[0][0]
                heapreplace(firsts, (lane[0][0], shard))
            else:
                return lane[0]
        return None

    def _bring_back(self, away: frozenset[str]) -> None:
        self._away = away
        for shard in self._aside - away:
            self._aside.discard(shard)
            self._list(shard, self._lanes[shard][0][0])

    def _list(self, shard: str, key: Key) -> None:
        self._listed[shard] = key
        heappush(self._firsts, (key, shard))
