"""The window [H, H+W) over the generation queue: groups that a trainer may take.

Owns the head, the edge, and the fill of a batch, by the rules of docs/scheduler.md (windowed FIFO,
MiniMax Forge, arXiv 2605.26494):

- A complete group inside is assigned to the open batch at once, if that has room for its domain.
- H is the lowest index whose group is neither consumed (trained or tombstoned) nor taken (assigned,
  or in a batch). It passes at most `most_taken` groups that are not consumed, and moves back only
  with a rewind: the groups of a released batch stay assigned, below H.
- If W shrinks, the edge stays until H is near enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from operator import attrgetter, itemgetter

from forge.core.queue.admission import UNBOUNDED
from forge.core.queue.groups import Group, Phase
from forge.core.queue.window.domain_shares import DomainShares
from forge.core.queue.window.open_batch import CompleteGroups, Filling
from forge.core.queue.window.phase_counts import PhaseCounts

_EVERY_OTHER = ""
"""Lane of all domains without a share."""
_OPEN = (Phase.QUEUED, Phase.RUNNING)
_INDEX = attrgetter("spec.index")
TAKEN_BATCHES = 4
"""H passes at most this many uncommitted batches, or W groups if that is more."""
_PART = 256
"""Groups that join the window together while a batch fills."""


class Window:
    """The view over one training queue. Call `moved` after each change of phase."""

    def __init__(self, *, size: int, shares: DomainShares, strict: bool = False) -> None:
        """`strict`: batches are chosen whole, no group is assigned before, and shares do not count:
        `take` returns the next groups of the queue, unless `adaptive` chooses instead."""
        self.size = size
        self.head = 0
        self._edge = 0
        """One above the highest index that joined the window. It may be below `edge`: after a slow
        head thousands of groups may join, and `take` needs one batch."""
        self._part = UNBOUNDED if strict else _PART
        self.next_index = 0
        """One above the highest known index."""
        self.unknown_from: int | None = None
        """From this index on, an index without a group may belong to an unread pool shard: the head
        waits there. None: every shard was read."""
        self._known_consumed: set[int] = set()
        """Indices of consumed groups from `unknown_from` on."""
        self._strict = strict
        self._shares = shares
        self._lanes = shares.shares.keys()
        """Domains with a share."""
        self._groups: dict[int, Group] = {}
        """Groups that are not consumed, by index."""
        self._counts = PhaseCounts()
        """Counts of groups inside that are not consumed."""
        self._complete = CompleteGroups()
        """Complete groups inside that are not assigned; empty if strict."""
        self._filling = Filling()
        self._passed: set[int] = set()
        """Indices below the head whose groups are taken and not consumed."""
        self._batch_groups = 0
        """The largest requested batch."""

    def begin_at(self, head: int) -> None:
        """Every group with a lower index is consumed. Precedes every `add`."""
        assert self.next_index == 0
        self.head = self._edge = head

    def reserve(self, next_index: int) -> None:
        """Lower indices belong to existing groups, in memory or not."""
        self.next_index = max(self.next_index, next_index)
        self._advance()

    def add(self, group: Group) -> None:
        """Adds a group to the queue, usually at its end."""
        index = group.spec.index
        self.next_index = max(self.next_index, index + 1)
        if not group.phase.consumed:
            self._groups[index] = group
            if index < self.head:
                self.rebuild((group,))
            elif index < self._edge:
                self._join((group,))
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
            self._unlist((group,))
        if spec.index < self._edge:
            self._counts.moved(group, before)
            if group.phase is Phase.COMPLETE:
                self._list((group,))
        if group.phase.consumed:
            self._forget((spec.index,))
            self._advance(self._part)

    def moved_together(self, groups: Sequence[Group], before: Phase) -> None:
        """`moved` for groups that changed from one phase to another together."""
        if not groups:
            return
        phase = groups[0].phase
        # The head already passed assigned groups.
        passed = before is Phase.COMPLETE and self._unlist(groups) and phase is Phase.BATCHED
        inside = [group for group in groups if group.spec.index < self._edge]
        self._counts.moved_together(inside, before, phase)
        if phase is Phase.COMPLETE:
            self._list(inside)
        elif phase.consumed:
            self._forget(map(_INDEX, groups))
        if not passed:
            self._advance(self._part)

    def relocated(self, group: Group, before: str) -> None:
        """A group is on another pool shard than `before`."""
        if group.spec.index < self._edge:
            self._counts.relocated(group, before)

    def rebuild(self, undone: Sequence[Group]) -> None:
        """Rebuild the window after a rewind: the groups `undone` are no longer consumed."""
        self._groups.update((group.spec.index, group) for group in undone)
        self.head = self._edge = min((self.head, *self._passed, *map(_INDEX, undone)))
        self._passed.clear()
        self._filling.clear()
        self._counts.clear()
        self._complete.clear()
        self._advance()

    def resize(self, size: int) -> None:
        """Change W; groups inside stay inside."""
        self.size = size
        self._advance()

    @property
    def edge(self) -> int:
        """One above the highest index inside; at most `next_index`."""
        self._advance()
        return self._edge

    def group_at(self, index: int) -> Group | None:
        """The group of an index, unless it is consumed."""
        return self._groups.get(index)

    @property
    def ready(self) -> int:
        """Complete groups inside, in no batch."""
        self._advance()
        return self._counts.complete

    @property
    def head_group(self) -> Group | None:
        """The oldest group that is neither consumed nor taken."""
        return self._groups.get(self.head)

    def inside(self, phase: Phase, *, away: frozenset[str] = frozenset()) -> int:
        """Groups of a phase inside, except those on the pool shards `away`."""
        self._advance()
        return self._counts.of(phase, away)

    def sampling(self, away: frozenset[str]) -> bool:
        """Whether groups inside and not on the pool shards `away` still run or wait to start."""
        return any(self.inside(phase, away=away) for phase in _OPEN)

    def more_coming(self, *, growing: bool) -> bool:
        """Whether more groups may join the window: a batch is committed or released, or, if
        `growing`, the queue becomes longer."""
        return self.inside(Phase.BATCHED) > 0 or (growing and not self.full)

    @property
    def full(self) -> bool:
        """Whether a longer queue would add nothing to the window."""
        return self.next_index >= self.head + self.size

    @property
    def width(self) -> int:
        """Current W; 0 if unbounded."""
        return 0 if self.size == UNBOUNDED else max(self.size, self.edge - self.head)

    @property
    def assigned(self) -> int:
        """Groups assigned to the open batch."""
        return len(self._filling)

    @property
    def most_taken(self) -> int:
        """Most groups below H that are taken and not consumed."""
        return max(self.size, TAKEN_BATCHES * self._batch_groups)

    def take(
        self, size: int, *, away: frozenset[str], can_progress: Callable[[], bool], growing: bool
    ) -> list[Group]:
        """Fill the next batch with complete groups: its groups in queue order once it is full, none
        while waiting is better.

        A domain that cannot fill its quota waits only for its open groups inside the window;
        without any, other domains fill its part in queue order. A batch is smaller than `size` only
        if the window can provide no more. `can_progress`: whether open groups may become complete
        before the window moves; `growing`: whether the queue may become longer.
        """
        self._batch_groups = max(self._batch_groups, size)
        if self._strict:
            waiting = can_progress() or self.more_coming(growing=growing)
            return self._take_next(size, away, waiting=waiting)
        quotas: Mapping[str, int] = self._shares.quotas(size) or {_EVERY_OTHER: size}
        while short := self._fill(quotas, away):
            if not away and self.ready < min(size, self._counts.waiting) and can_progress():
                return []
            still_open = self._open_by_lane(away)
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
        """Assign complete groups, each lane up to its quota, while that moves the window. Returns
        the lanes that are short; if any is, the whole window has joined."""
        while True:
            if self._unassigned(away):
                for lane, quota in quotas.items():
                    room = quota - self._filling.usable(lane, away)
                    self._assign(lane, self._oldest(lane, room, away))
            usable = self._filling.usable
            short = [lane for lane, quota in quotas.items() if usable(lane, away) < quota]
            if not self._advance(self._part) or not short:
                return short

    def _fill_in(self, size: int, away: frozenset[str]) -> bool:
        """Assign groups beyond the quota of their lane, in queue order, until the batch is full or
        the window has moved; whether it has."""
        for _ in range(size - self._filling.usable_of_all(away)):
            firsts = [(self._oldest(lane, 1, away), lane) for lane in self._complete]
            first, lane = min(filter(itemgetter(0), firsts), default=([], ""))
            if not self._assign(lane, first):
                break
            if self._advance(self._part):
                return True
        return False

    def _unassigned(self, away: frozenset[str]) -> int:
        """Number of complete groups inside that are not assigned."""
        return self._complete_inside(away) - self._filling.usable_of_all(away)

    def _complete_inside(self, away: frozenset[str]) -> int:
        return self._counts.of(Phase.COMPLETE, away) if away else self._counts.complete

    def _oldest(self, lane: str, limit: int, away: frozenset[str]) -> list[int]:
        """Up to `limit` of a lane's complete indices that are not assigned, in queue order."""
        if not away:
            return self._complete.oldest(lane, limit)
        groups = self._groups
        return self._complete.oldest(lane, limit, lambda i: groups[i].spec.shard not in away)

    def _assign(self, lane: str, indices: Sequence[int]) -> bool:
        """Assign groups of a lane; whether there are any."""
        if indices:
            self._complete.remove(lane, indices)
            self._filling.extend(lane, indices, map(self._groups.__getitem__, indices))
        return bool(indices)

    def _open_by_lane(self, away: frozenset[str]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for domain, count in self._counts.by_domain(_OPEN, away):
            counts[self._lane(domain)] += count
        return counts

    def _advance(self, most: int = UNBOUNDED) -> bool:
        """Move the head, then the edge by at most `most` indices; whether the edge moved."""
        groups, assigned, unread = (
            self._groups,
            self._filling.indices,
            self.unknown_from is not None,
        )
        room = self.most_taken - len(self._passed)
        for head in range(self.head, self.next_index):
            group = groups.get(head)
            if group is None:
                if unread and self._is_unknown(head):
                    break
                # Otherwise it is consumed, or belonged to a failed submission.
            elif room > 0 and (head in assigned or group.phase is Phase.BATCHED):
                self._passed.add(head)
                room -= 1
            else:
                break
        else:
            head = max(self.head, self.next_index)
        self.head = head
        # Below the head there are only groups that it passed.
        start = self._edge if self._passed else max(self._edge, head)
        edge = min(head + self.size, self.next_index, start + most)
        if edge <= self._edge:
            return False
        self._edge = edge
        self._join([group for group in map(groups.get, range(start, edge)) if group is not None])
        return True

    def _forget(self, indices: Iterable[int]) -> None:
        """Forgets the consumed groups of these indices."""
        for index in indices:
            self._groups.pop(index, None)
            self._passed.discard(index)
            self._note_consumed(index)

    @property
    def lowest_pending(self) -> int:
        """Every known group with a lower index is consumed."""
        return min(self._passed, default=self.head)

    def all_known(self) -> None:
        """Every pool shard was read."""
        self.unknown_from = None
        self._known_consumed.clear()
        self._advance()

    def _is_unknown(self, index: int) -> bool:
        unread = self.unknown_from is not None and index >= self.unknown_from
        return unread and index not in self._groups and index not in self._known_consumed

    def _note_consumed(self, index: int) -> None:
        if self.unknown_from is not None and index >= self.unknown_from:
            self._known_consumed.add(index)

    def _join(self, groups: Sequence[Group]) -> None:
        """Groups join the window."""
        self._counts.add(groups)
        self._list([group for group in groups if group.phase is Phase.COMPLETE])

    def _list(self, groups: Iterable[Group]) -> None:
        """Groups inside become complete, in no batch."""
        for group in groups:
            lane, index = self._lane(group.spec.domain), group.spec.index
            if index < self.head:
                # Its batch was released; the head passed it and stays.
                self._filling.extend(lane, (index,), (group,))
            elif not self._strict:
                self._complete.add(lane, index)

    def _unlist(self, groups: Iterable[Group]) -> bool:
        """Groups leave COMPLETE; whether all of them were assigned."""
        others = self._filling.discard(groups)
        for group in others:
            if not self._strict and group.spec.index < self._edge:
                self._complete.discard(self._lane(group.spec.domain), group.spec.index)
        return not others

    def _lane(self, domain: str) -> str:
        return domain if domain in self._lanes else _EVERY_OTHER
