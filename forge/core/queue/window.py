"""The window [H, H+W) over the generation queue: what a trainer may see, and which it takes.

Owns the head, the far edge, and the choice of a batch. The rules (MiniMax Forge, arXiv
2605.26494, windowed FIFO):

- A complete group below the edge, H+W, is assigned to the batch being filled at once, as long as
  that batch has room for its domain. Nothing at or beyond the edge is.
- The head H is the lowest index whose group is neither consumed nor taken. Consumed means TRAINED
  (its batch is committed) or TOMBSTONED; taken means assigned, or in a batch. So the window moves
  while a batch fills.
- A batch that is given back leaves H where it is: its groups are below H, stay assigned, and are
  the first of the next batch. H moves back with a rewind, and with a new leader, who knows only
  what is durable.
- H passes at most `most_taken` groups that are not consumed: trainers that never commit cannot
  drive it through the queue.
- When W becomes smaller the edge stays until the head has come closer: what was announced holds.
  Only a rewind moves it back.

How groups become complete, and time, are `forge.core.queue.generation_queue`'s business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, takewhile
from operator import attrgetter, itemgetter

from forge.core.queue.admission import UNBOUNDED
from forge.core.queue.domain_shares import DomainShares
from forge.core.queue.groups import Group, Phase
from forge.core.queue.open_batch import Filling

_EVERY_OTHER = ""
"""Lane of all domains without a share of their own."""
_OPEN = (Phase.QUEUED, Phase.RUNNING)
_PLACE = attrgetter("spec.domain", "spec.shard")
_PHASE_AND_PLACE = attrgetter("phase", "spec.domain", "spec.shard")
_INDEX = attrgetter("spec.index")
TAKEN_BATCHES = 4
"""H passes so many batches that are not committed, or W groups where that is more."""


class Window:
    """The view over one training queue. Call `moved` after each change of phase."""

    def __init__(self, *, size: int, shares: DomainShares, strict: bool = False) -> None:
        """`strict`: batches are chosen whole, and nothing is assigned before: `take` returns the
        next groups of the queue, and shares do not count. Another chooser may be in its place."""
        self.size = size
        self.head = 0
        self.edge = 0
        """One above the highest index inside; at most `next_index`."""
        self.next_index = 0
        """One above the highest index known."""
        self.unknown_from: int | None = None
        """From this index on, an index that nobody holds may be a group's on a pool shard that has
        not been read: the head waits there. None: every shard has been read."""
        self._known_consumed: set[int] = set()
        """Indices from there on whose groups are consumed."""
        self._strict = strict
        self._shares = shares
        self._groups: dict[int, Group] = {}
        """Those that are not consumed, by index."""
        self._counts: Counter[tuple[Phase, str, str]] = Counter()
        """Groups inside that are not consumed, by (phase, domain, pool shard)."""
        self._waiting = 0
        """Those of them that are in no batch."""
        self.ready = 0
        """Those of them that are complete."""
        self._complete: defaultdict[str, list[int]] = defaultdict(list)
        """Sorted indices inside of what is complete and not assigned, by lane; empty if strict."""
        self._filling = Filling()
        self._passed: set[int] = set()
        """Indices below the head whose groups are taken and not consumed."""
        self._batch_groups = 0
        """The largest batch that was asked for."""

    def add(self, group: Group) -> None:
        """A group joined the queue, usually at its end."""
        index = group.spec.index
        self.next_index = max(self.next_index, index + 1)
        if not group.phase.consumed:
            self._groups[index] = group
            if index < self.head:
                self.rebuild((group,))
            elif index < self.edge:
                self._count_in((group,))
        else:
            self._note_consumed(index)
        self._advance()

    def add_in_order(self, groups: Sequence[Group]) -> None:
        """`add` for many, by index."""
        if groups and groups[0].spec.index < self.next_index:
            for group in groups:
                self.add(group)
            return
        left = [group for group in groups if not group.phase.consumed]
        self._groups.update(zip(map(_INDEX, left), left, strict=True))
        if groups:
            self.next_index = groups[-1].spec.index + 1
        if self.unknown_from is not None and len(left) < len(groups):
            for group in groups:
                if group.phase.consumed:
                    self._note_consumed(group.spec.index)
        self._advance()

    def moved(self, group: Group, before: Phase) -> None:
        """The phase of a group changed, not by a rewind."""
        spec = group.spec
        if before is Phase.COMPLETE:
            self._unlist(group)
        if spec.index < self.edge:
            self._count(before, spec.domain, spec.shard, -1)
            self._count(group.phase, spec.domain, spec.shard, 1)
            if group.phase is Phase.COMPLETE:
                self._list(group)
        if group.phase.consumed:
            self._forget((spec.index,))
            self._advance()

    def moved_together(self, groups: Sequence[Group], before: Phase) -> None:
        """`moved` for many that went from one phase to another."""
        if before is Phase.COMPLETE:
            for group in groups:
                self._unlist(group)
        inside = [group for group in groups if group.spec.index < self.edge]
        for (domain, shard), count in Counter(map(_PLACE, inside)).items():
            self._count(before, domain, shard, -count)
        self._count_in(inside)
        if groups and groups[0].phase.consumed:
            self._forget(map(_INDEX, groups))
        self._advance()

    def rebuild(self, undone: Sequence[Group]) -> None:
        """Start anew from what is consumed; the groups `undone` are not any more."""
        self._groups.update((group.spec.index, group) for group in undone)
        self.head = self.edge = min((self.head, *self._passed, *map(_INDEX, undone)))
        self._passed.clear()
        self._filling.clear()
        self._counts.clear()
        self._waiting = self.ready = 0
        self._complete.clear()
        self._advance()

    def resize(self, size: int) -> None:
        """W is another from now on, as far as nothing that is inside has to leave."""
        self.size = size
        self._advance()

    @property
    def head_group(self) -> Group | None:
        """The oldest group that is neither consumed nor taken."""
        return self._groups.get(self.head)

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

    def more_coming(self, *, growing: bool) -> bool:
        """Whether others may bring more into the window: a batch that is out is committed or given
        back, or, if `growing`, the queue becomes longer."""
        return self.inside(Phase.BATCHED) > 0 or (growing and not self.full)

    @property
    def full(self) -> bool:
        """Whether a longer queue would bring nothing more into the window."""
        return self.next_index >= self.head + self.size

    @property
    def width(self) -> int:
        """W as it is now; 0 when there is no bound."""
        return 0 if self.size == UNBOUNDED else max(self.size, self.edge - self.head)

    @property
    def assigned(self) -> int:
        """Groups assigned to the batch being filled."""
        return len(self._filling)

    def is_assigned(self, group: Group) -> bool:
        return group.spec.index in self._filling.indices

    @property
    def most_taken(self) -> int:
        """How many groups below H may be taken and not consumed."""
        return max(self.size, TAKEN_BATCHES * self._batch_groups)

    def take(
        self, size: int, *, away: frozenset[str], can_progress: Callable[[], bool], growing: bool
    ) -> list[Group]:
        """Fill the next batch with what is complete; its groups in queue order once it is full,
        none while it is better to wait.

        A domain that cannot fill its quota waits only for its own open groups inside the window;
        without any, others fill its part in queue order. A batch goes out smaller than `size` only
        when the window can give no more. `can_progress` says whether open groups can, as the window
        stands, `growing` whether the queue may become longer.
        """
        self._batch_groups = max(self._batch_groups, size)
        if self._strict:
            waiting = can_progress() or self.more_coming(growing=growing)
            return self._take_next(size, away, waiting=waiting)
        quotas: Mapping[str, int] = self._shares.quotas(size) or {_EVERY_OTHER: size}
        while short := self._fill(quotas, away):
            if not away and self.ready < min(size, self._waiting) and can_progress():
                return []
            still_open = self._by_lane(away, _OPEN)
            awaited = still_open.total() if self._complete_inside(away) < size else 0
            if (awaited or any(still_open[lane] for lane in short)) and can_progress():
                return []
            if self._complete_inside(away) < size and self.more_coming(growing=growing):
                return []
            if not self._fill_in(size, away):
                break
        picked = self._filling.pick(size, quotas, away)
        if picked:
            self._shares.settle(size, quotas)
        return picked

    def _take_next(self, size: int, away: frozenset[str], *, waiting: bool) -> list[Group]:
        picked: list[Group] = []
        known = takewhile(lambda index: not self._is_unknown(index), range(self.head, self.edge))
        ahead = map(self._groups.get, known)
        for group in chain(self._filling, ahead):
            if group is None or group.phase is Phase.BATCHED:
                continue
            if len(picked) == size or group.phase.open or group.spec.shard in away:
                break
            picked.append(group)
        else:
            waiting = waiting and not self.full
        return picked if len(picked) == size or not waiting else []

    def _fill(self, quotas: Mapping[str, int], away: frozenset[str]) -> list[str]:
        """Assign what is complete, each lane up to its quota, while that moves the window; the
        lanes that are short then."""
        while self._unassigned(away):
            found = False
            for lane, quota in quotas.items():
                room = quota - self._filling.usable(lane, away)
                found = self._assign(lane, self._oldest(lane, room, away)) or found
            if not found:
                break
            self._advance()
        return [lane for lane, quota in quotas.items() if self._filling.usable(lane, away) < quota]

    def _fill_in(self, size: int, away: frozenset[str]) -> bool:
        """Assign groups beyond their lane's quota, in queue order, until the batch is full or the
        window has moved; whether it has."""
        edge = self.edge
        for _ in range(size - self._filling.usable_of_all(away)):
            firsts = [(self._oldest(lane, 1, away), lane) for lane in self._complete]
            first, lane = min(filter(itemgetter(0), firsts), default=([], ""))
            if not self._assign(lane, first):
                break
            self._advance()
            if self.edge > edge:
                break
        return self.edge > edge

    def _unassigned(self, away: frozenset[str]) -> int:
        """Complete groups inside that are not assigned."""
        return self._complete_inside(away) - self._filling.usable_of_all(away)

    def _complete_inside(self, away: frozenset[str]) -> int:
        return self.inside(Phase.COMPLETE, away=away) if away else self.ready

    def _oldest(self, lane: str, limit: int, away: frozenset[str]) -> list[int]:
        """Up to `limit` of a lane's complete indices that are not assigned, in queue order."""
        order = self._complete[lane]
        if limit <= 0:
            return []
        if not away:
            return order[:limit]
        usable = (index for index in order if self._groups[index].spec.shard not in away)
        return list(islice(usable, limit))

    def _assign(self, lane: str, indices: Sequence[int]) -> bool:
        """The groups of a lane; whether there are any."""
        if not indices:
            return False
        order = self._complete[lane]
        if order[: len(indices)] == indices:
            del order[: len(indices)]
        else:
            gone = set(indices)
            order[:] = [index for index in order if index not in gone]
        self._filling.extend(lane, indices, map(self._groups.__getitem__, indices))
        return True

    def _by_lane(self, away: frozenset[str], phases: Sequence[Phase]) -> Counter[str]:
        found: Counter[str] = Counter()
        for (phase, domain, shard), count in self._counts.items():
            if phase in phases and shard not in away:
                found[self._lane(domain)] += count
        return found

    def _advance(self) -> None:
        head, groups, assigned = self.head, self._groups, self._filling.indices
        room = self.most_taken - len(self._passed)
        while head < self.next_index:
            group = groups.get(head)
            if group is None and self._is_unknown(head):
                break
            # Else an index without a group is consumed, or belonged to a submission that failed.
            if group is not None:
                taken = group.phase is Phase.BATCHED or head in assigned
                if not taken or room <= 0:
                    break
                self._passed.add(head)
                room -= 1
            head += 1
        self.head = head
        edge = min(head + self.size, self.next_index)
        if edge > self.edge:
            inside = range(max(self.edge, head), edge)
            fresh = [groups[index] for index in inside if index in groups]
            self.edge = edge
            self._count_in(fresh)

    def _forget(self, indices: Iterable[int]) -> None:
        """Their groups are consumed."""
        for index in indices:
            self._groups.pop(index, None)
            self._passed.discard(index)
            self._note_consumed(index)

    @property
    def lowest_pending(self) -> int:
        """Every group with a lower index is consumed, of those that are known."""
        return min(self._passed, default=self.head)

    def all_known(self) -> None:
        """Every pool shard has been read."""
        self.unknown_from = None
        self._known_consumed.clear()
        self._advance()

    def _is_unknown(self, index: int) -> bool:
        unread = self.unknown_from is not None and index >= self.unknown_from
        return unread and index not in self._groups and index not in self._known_consumed

    def _note_consumed(self, index: int) -> None:
        if self.unknown_from is not None and index >= self.unknown_from:
            self._known_consumed.add(index)

    def _count_in(self, groups: Sequence[Group]) -> None:
        """Groups inside, all of them as they are now."""
        for (phase, domain, shard), count in Counter(map(_PHASE_AND_PLACE, groups)).items():
            self._count(phase, domain, shard, count)
        for group in groups:
            if group.phase is Phase.COMPLETE:
                self._list(group)

    def _list(self, group: Group) -> None:
        """A group inside is complete, and in no batch."""
        lane, index = self._lane(group.spec.domain), group.spec.index
        if index < self.head:
            # Its batch was given back; the head has passed it and stays.
            self._filling.extend(lane, (index,), (group,))
        elif not self._strict:
            order = self._complete[lane]
            # What the window has just reached is above all others.
            at = len(order) if not order or order[-1] < index else bisect_left(order, index)
            order.insert(at, index)

    def _unlist(self, group: Group) -> None:
        index = group.spec.index
        if self._filling.discard(index) or self._strict or index >= self.edge:
            return
        order = self._complete[self._lane(group.spec.domain)]
        at = bisect_left(order, index)
        if at < len(order) and order[at] == index:
            del order[at]

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
