"""The window [H, H+W) over the generation queue: what a trainer may see, and which it takes.

Owns the head, the far edge, and the choice of a batch. The rules (MiniMax Forge, arXiv
2605.26494, windowed FIFO):

- The head H is the lowest index whose group is not consumed. Consumed means TRAINED (its batch is
  committed) or TOMBSTONED. A batch that is handed out but not committed is *not* consumed: H rests
  on what is durable, so a lost batch never moves it back; only a rewind does.
- Only a COMPLETE group with index < H+W is ever handed out, and any of them at once.

How groups become complete, and time, are `forge.core.generation`'s business.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush

from forge.core.groups import Group, Phase
from forge.core.shares import DomainShares

_EVERY_OTHER = ""
"""Lane of all domains without a share of their own."""


class Window:
    """The view over one training queue. Call `moved` after each change of a group's phase."""

    def __init__(self, *, size: int, shares: DomainShares) -> None:
        self.size = size
        self.head = 0
        self.next_index = 0
        """One above the highest index known."""
        self._shares = shares
        self._groups: dict[int, Group] = {}
        self._end = size
        """Groups below it have been counted in."""
        self._counts: Counter[tuple[Phase, str, str]] = Counter()
        """Groups inside that are not consumed, by (phase, lane, pool shard)."""
        self._complete: defaultdict[str, list[int]] = defaultdict(list)
        """Heap of complete indices per lane; an entry whose group moved on is dropped lazily."""
        self._listed: set[int] = set()

    def add(self, group: Group) -> None:
        """A group joined the queue, usually at its end."""
        index = group.spec.index
        self._groups[index] = group
        self.next_index = max(self.next_index, index + 1)
        if index < self.head:
            self.rebuild(index)
        elif index < self._end:
            self._count_in(group)
        self._advance()

    def moved(self, group: Group, before: Phase) -> None:
        """The phase of `group` changed, not by a rewind."""
        if group.spec.index < self._end:
            self._counts[before, self._lane(group), group.spec.shard] -= 1
            self._count_in(group)
            self._advance()

    def rebuild(self, head: int) -> None:
        """Move the head back: consumed groups from `head` on became visible again."""
        self.head = min(self.head, head)
        self._end = self.head
        self._counts.clear()
        self._complete.clear()
        self._listed.clear()
        self._advance()

    def inside(self, phase: Phase, *, away: frozenset[str] = frozenset()) -> int:
        """Groups of a phase in [H, H+W), without those on pool shards that are away."""
        return sum(
            count
            for (counted, _, shard), count in self._counts.items()
            if counted is phase and shard not in away
        )

    @property
    def full(self) -> bool:
        """Whether the queue reaches to the far edge."""
        return self.next_index >= self.head + self.size

    def take(
        self, size: int, *, away: frozenset[str], sampling: bool, more_coming: bool
    ) -> list[Group]:
        """The groups of the next batch, in queue order; none while it is better to wait.

        A domain that cannot fill its quota waits only for its own open groups inside the window;
        without any, others fill its part in queue order. A batch goes out smaller than `size` only
        when the window can give no more. `sampling` says whether open groups can make progress,
        `more_coming` whether the head may move, or the queue grow, by somebody else's doing.
        """
        complete, still_open = self._by_lane(away, Phase.COMPLETE), self._by_lane(away, *_OPEN)
        quotas = self._shares.quotas(size)
        short = [lane for lane, quota in quotas.items() if complete[lane] < quota]
        if sampling and any(still_open[lane] for lane in short):
            return []
        if complete.total() < size and (more_coming or (sampling and still_open.total())):
            return []
        picked = self._pick(size, quotas, away)
        if picked:
            self._shares.settle(size, quotas)
        return picked

    def _pick(self, size: int, quotas: dict[str, int], away: frozenset[str]) -> list[Group]:
        passed_over: list[Group] = []
        picked: list[Group] = []
        for lane, quota in quotas.items():
            picked += self._pop(lane, quota, away, passed_over)
        missing = size - len(picked)
        if missing:
            spare: list[Group] = []
            for lane in tuple(self._complete):
                spare += self._pop(lane, missing, away, passed_over)
            spare.sort(key=_queue_order)
            picked += spare[:missing]
            passed_over += spare[missing:]
        for group in passed_over:
            self._list(group)
        return sorted(picked, key=_queue_order)

    def _pop(
        self, lane: str, limit: int, away: frozenset[str], passed_over: list[Group]
    ) -> Iterator[Group]:
        """Up to `limit` complete groups of a lane in queue order, taken off its heap."""
        heap = self._complete[lane]
        while limit and heap:
            index = heappop(heap)
            self._listed.discard(index)
            group = self._groups[index]
            if group.phase is not Phase.COMPLETE:
                continue
            if group.spec.shard in away:
                passed_over.append(group)
                continue
            limit -= 1
            yield group

    def _by_lane(self, away: frozenset[str], *phases: Phase) -> Counter[str]:
        found: Counter[str] = Counter()
        for (phase, lane, shard), count in self._counts.items():
            if phase in phases and shard not in away:
                found[lane] += count
        return found

    def _advance(self) -> None:
        while self.head < self.next_index and self._passable(self.head):
            self.head += 1
        for index in range(self._end, self.head + self.size):
            if index in self._groups:
                self._count_in(self._groups[index])
        self._end = max(self._end, self.head + self.size)

    def _passable(self, index: int) -> bool:
        # An index nobody holds belonged to a submission that failed: nothing to wait for.
        return index not in self._groups or self._groups[index].phase.consumed

    def _count_in(self, group: Group) -> None:
        if group.phase.consumed:
            return
        self._counts[group.phase, self._lane(group), group.spec.shard] += 1
        if group.phase is Phase.COMPLETE:
            self._list(group)

    def _list(self, group: Group) -> None:
        index = group.spec.index
        if index not in self._listed:
            self._listed.add(index)
            heappush(self._complete[self._lane(group)], index)

    def _lane(self, group: Group) -> str:
        return group.spec.domain if group.spec.domain in self._shares.shares else _EVERY_OTHER


def _queue_order(group: Group) -> int:
    return group.spec.index


_OPEN = (Phase.QUEUED, Phase.RUNNING)
