"""The window [H, H+W) over the generation queue: what a trainer may see, and which it takes.

Owns the head, the far edge, and the choice of a batch. The rules (MiniMax Forge, arXiv
2605.26494, windowed FIFO):

- The head H is the lowest index whose group is not consumed. Consumed means TRAINED (its batch is
  committed) or TOMBSTONED. A batch that is handed out but not committed is *not* consumed: H rests
  on what is durable, so a lost batch never moves it back; only a rewind does.
- Only a COMPLETE group below the edge, H+W, is ever handed out, and any of them at once. When W
  becomes smaller the edge stays until the head has come closer: what was announced holds. Only a
  rewind moves it back.

How groups become complete, and time, are `forge.core.generation`'s business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import attrgetter

from forge.core.admission import UNBOUNDED
from forge.core.groups import Group, Phase
from forge.core.shares import DomainShares

_EVERY_OTHER = ""
"""Lane of all domains without a share of their own."""
_OPEN = (Phase.QUEUED, Phase.RUNNING)
_PLACE = attrgetter("spec.domain", "spec.shard")
_PHASE_AND_PLACE = attrgetter("phase", "spec.domain", "spec.shard")
_INDEX = attrgetter("spec.index")


class Window:
    """The view over one training queue. Call `moved` after each change of phase."""

    def __init__(self, *, size: int, shares: DomainShares, strict: bool = False) -> None:
        """`strict`: nothing overtakes, so that a batch is the next groups of the queue, and shares
        do not count."""
        self.size = size
        self.head = 0
        self.edge = 0
        """One above the highest index inside; at most `next_index`."""
        self.next_index = 0
        """One above the highest index known."""
        self._strict = strict
        self._shares = shares
        self._groups: dict[int, Group] = {}
        self._counts: Counter[tuple[Phase, str, str]] = Counter()
        """Groups inside that are not consumed, by (phase, domain, pool shard)."""
        self._waiting = 0
        """Those of them that are in no batch."""
        self.ready = 0
        """Those of them that are complete."""
        self._complete: defaultdict[str, list[int]] = defaultdict(list)
        """Sorted complete indices inside, by lane; one whose group moved on is dropped lazily."""

    def add(self, group: Group) -> None:
        """A group joined the queue, usually at its end."""
        index = group.spec.index
        self._groups[index] = group
        self.next_index = max(self.next_index, index + 1)
        if index < self.head:
            self.rebuild(index)
        elif index < self.edge:
            self._count_in((group,))
        self._advance()

    def add_in_order(self, groups: Sequence[Group]) -> None:
        """`add` for many, by index."""
        if groups and groups[0].spec.index < self.next_index:
            for group in groups:
                self.add(group)
            return
        self._groups.update(zip(map(_INDEX, groups), groups, strict=True))
        if groups:
            self.next_index = groups[-1].spec.index + 1
        self._advance()

    def moved(self, group: Group, before: Phase) -> None:
        """The phase of a group changed, not by a rewind."""
        spec = group.spec
        if spec.index < self.edge:
            self._count(before, spec.domain, spec.shard, -1)
            self._count(group.phase, spec.domain, spec.shard, 1)
            if group.phase is Phase.COMPLETE:
                _insert(self._complete[self._lane(spec.domain)], spec.index)
        if group.phase.consumed:
            self._advance()

    def moved_together(self, groups: Sequence[Group], before: Phase) -> None:
        """`moved` for many that went from one phase to another."""
        inside = [group for group in groups if group.spec.index < self.edge]
        for (domain, shard), count in Counter(map(_PLACE, inside)).items():
            self._count(before, domain, shard, -count)
        self._count_in(inside)
        self._advance()

    def rebuild(self, head: int) -> None:
        """Move the head back: consumed groups from `head` on became visible again."""
        self.head = self.edge = min(self.head, head)
        self._counts.clear()
        self._waiting = self.ready = 0
        self._complete.clear()
        self._advance()

    def resize(self, size: int) -> None:
        """W is another from now on, as far as nothing that is inside has to leave."""
        self.size = size
        self._advance()

    def inside(self, phase: Phase, *, away: frozenset[str] = frozenset()) -> int:
        """Groups of a phase in the window, without those on pool shards that are away."""
        return sum(
            count
            for (counted, _, shard), count in self._counts.items()
            if counted is phase and shard not in away
        )

    def sampling(self, away: frozenset[str]) -> bool:
        """Whether groups inside are still to complete, on shards that answer."""
        return any(self.inside(phase, away=away) for phase in _OPEN)

    @property
    def full(self) -> bool:
        """Whether a longer queue would bring nothing more into the window."""
        return self.next_index >= self.head + self.size

    @property
    def width(self) -> int:
        """W as it is now; 0 when there is no bound."""
        return 0 if self.size == UNBOUNDED else max(self.size, self.edge - self.head)

    def take(
        self, size: int, *, away: frozenset[str], sampling: bool, more_coming: bool
    ) -> list[Group]:
        """The groups of the next batch, in queue order; none while it is better to wait.

        A domain that cannot fill its quota waits only for its own open groups inside the window;
        without any, others fill its part in queue order. A batch goes out smaller than `size` only
        when the window can give no more. `sampling` says whether open groups can make progress,
        `more_coming` whether the head may move, or the queue grow, by somebody else's doing.
        """
        if self.ready < size and sampling and not away and self._waiting > self.ready:
            return []
        if self._strict:
            return self._take_next(size, away, waiting=more_coming or sampling)
        complete, still_open = self._by_lane(away, (Phase.COMPLETE,)), self._by_lane(away, _OPEN)
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

    def _take_next(self, size: int, away: frozenset[str], *, waiting: bool) -> list[Group]:
        picked: list[Group] = []
        for index in range(self.head, self.edge):
            group = self._groups.get(index)
            if group is None or group.phase.consumed or group.phase is Phase.BATCHED:
                continue
            if len(picked) == size or group.phase.open or group.spec.shard in away:
                break
            picked.append(group)
        else:
            waiting = waiting and not self.full
        return picked if len(picked) == size or not waiting else []

    def _pick(self, size: int, quotas: dict[str, int], away: frozenset[str]) -> list[Group]:
        picked: list[Group] = []
        for lane, quota in quotas.items():
            picked += self._pop(lane, quota, away)
        missing = size - len(picked)
        if missing:
            spare: list[Group] = []
            for lane in tuple(self._complete):
                spare += self._pop(lane, missing, away)
            spare.sort(key=_INDEX)
            picked += spare[:missing]
            for group in spare[missing:]:
                _insert(self._complete[self._lane(group.spec.domain)], group.spec.index)
        picked.sort(key=_INDEX)
        return picked

    def _pop(self, lane: str, limit: int, away: frozenset[str]) -> list[Group]:
        """Up to `limit` complete groups of a lane in queue order, taken off its list."""
        order, groups = self._complete[lane], self._groups
        popped: list[Group] = []
        passed_over: list[int] = []
        looked_at = 0
        while len(popped) < limit and looked_at < len(order):
            part = order[looked_at : looked_at + limit - len(popped)]
            looked_at += len(part)
            for index in part:
                group = groups[index]
                if group.phase is not Phase.COMPLETE:
                    continue
                if group.spec.shard in away:
                    passed_over.append(index)
                else:
                    popped.append(group)
        order[:looked_at] = passed_over
        return popped

    def _by_lane(self, away: frozenset[str], phases: Sequence[Phase]) -> Counter[str]:
        found: Counter[str] = Counter()
        for (phase, domain, shard), count in self._counts.items():
            if phase in phases and shard not in away:
                found[self._lane(domain)] += count
        return found

    def _advance(self) -> None:
        head, groups = self.head, self._groups
        while head < self.next_index:
            group = groups.get(head)
            # An index nobody holds belonged to a submission that failed: nothing to wait for.
            if group is not None and not group.phase.consumed:
                break
            head += 1
        self.head = head
        edge = min(head + self.size, self.next_index)
        if edge > self.edge:
            inside = range(max(self.edge, head), edge)
            fresh = [groups[index] for index in inside if index in groups]
            self.edge = edge
            self._count_in(fresh)

    def _count_in(self, groups: Sequence[Group]) -> None:
        """Groups inside, all of them as they are now."""
        for (phase, domain, shard), count in Counter(map(_PHASE_AND_PLACE, groups)).items():
            self._count(phase, domain, shard, count)
        for group in groups:
            if group.phase is Phase.COMPLETE:
                _insert(self._complete[self._lane(group.spec.domain)], group.spec.index)

    def _count(self, phase: Phase, domain: str, shard: str, count: int) -> None:
        if phase.consumed:
            return
        self._counts[phase, domain, shard] += count
        if phase is not Phase.BATCHED:
            self._waiting += count
        if phase is Phase.COMPLETE:
            self.ready += count

    def _lane(self, domain: str) -> str:
        return domain if domain in self._shares.shares else _EVERY_OTHER


def _insert(order: list[int], index: int) -> None:
    """Into its place, once."""
    at = bisect_left(order, index)
    if at == len(order) or order[at] != index:
        order.insert(at, index)
