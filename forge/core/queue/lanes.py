"""One order over items that lie on pool shards, where some shards may be away.

Each shard has a lane, a heap of its items, and one heap is over the first items of all lanes. So
the first item is found in the same time however many shards there are, and a shard that goes away
or comes back costs one entry, however many items lie on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[float, int, int]


class Lanes(Generic[Item]):
    """Items by key, the lowest first. No two items have one key."""

    def __init__(self, waits: Callable[[Item], bool]) -> None:
        """`waits`: whether an item is still to be found; one that is not is dropped when it comes
        up."""
        self._waits = waits
        self._lanes: defaultdict[str, list[tuple[Key, Item]]] = defaultdict(list)
        """By pool shard."""
        self._firsts: list[tuple[Key, str]] = []
        """The heap over the lanes: a key and a shard. Only the entry that `_listed` names is valid;
        its key may be that of an item that is gone."""
        self._listed: dict[str, Key] = {}
        """By shard, the key of its valid entry. None for a lane that is empty, or set aside."""
        self._aside: set[str] = set()
        """Shards whose lanes came up while they were away."""
        self._away: frozenset[str] = frozenset()

    def push(self, shard: str, key: Key, item: Item) -> None:
        heappush(self._lanes[shard], (key, item))
        listed = self._listed.get(shard)
        if shard not in self._aside and (listed is None or key < listed):
            self._list(shard, key)

    def first(self, away: frozenset[str]) -> tuple[Key, Item] | None:
        """The lowest item on a shard that is not away."""
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
                while lane and not self._waits(lane[0][1]):
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
