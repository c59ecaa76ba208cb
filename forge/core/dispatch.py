"""In which order rollouts are handed to runners, and which of them are out.

Owns the strict order (evaluation first, then by place, then by rollout index), the claims
that are out and the two clocks on rollouts: the end of a claim and the end of a back-off. Whether
a further group may start is `forge.core.admission`'s rule; `forge.core.generation` asks both.

Entries are kept per pool shard, so that those of a shard that is away cost nothing to pass over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from forge.core.groups import Group, Lease, Phase, Rollout, RolloutPhase
from forge.core.trajectory import TrajectoryId


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One rollout of one group, ordered as it is handed out."""

    place: float
    queue_index: int
    rollout_index: int
    group: Group = field(compare=False, repr=False)

    @classmethod
    def of(cls, group: Group, rollout_index: int) -> Slot:
        return cls(group.place, group.spec.index, rollout_index, group)

    @property
    def rollout(self) -> Rollout:
        return self.group.rollout(self.rollout_index)


@dataclass(slots=True)
class _Lane:
    """What waits to be handed out, of one purpose on one pool shard."""

    fresh: list[tuple[float, int, Group]] = field(default_factory=list)
    """By place and queue index."""
    ready: list[tuple[float, int, int, Slot]] = field(default_factory=list)
    """By place, queue index and rollout index."""

    def first_fresh(self) -> Group | None:
        while self.fresh and self.fresh[0][2].phase is not Phase.QUEUED:
            heappop(self.fresh)
        return self.fresh[0][2] if self.fresh else None

    def first_ready(self) -> Slot | None:
        while self.ready and not _due(self.ready[0][3]):
            slot = heappop(self.ready)[3]
            # A closed group has no rollouts: to look at one would make them anew.
            if slot.group.phase.open:
                slot.rollout.listed = False
        return self.ready[0][3] if self.ready else None


def _order_of(group: Group) -> tuple[float, int]:
    return group.place, group.spec.index


def _due(slot: Slot) -> bool:
    return slot.group.phase is Phase.RUNNING and slot.rollout.phase is RolloutPhase.READY


class Dispatch:
    """The order of hand-out over any number of shards."""

    def __init__(self, limited: frozenset[str] = frozenset()) -> None:
        """`limited`: domains that may be held back, see `hold_back`."""
        self._limited = limited
        self._held_back: set[str] = set()
        self._lanes: defaultdict[tuple[bool, str, str], _Lane] = defaultdict(_Lane)
        """By purpose, pool shard and, of those that may be held back, domain."""

    def hold_back(self, domain: str, held: bool) -> None:
        """Whether groups of a domain that wait to be started are passed over."""
        (self._held_back.add if held else self._held_back.discard)(domain)

    @property
    def holds_back(self) -> bool:
        """Whether any domain is passed over."""
        return bool(self._held_back)

    def list_group(self, group: Group) -> None:
        """`group` waits to be started."""
        heappush(self._lane(group).fresh, (group.place, group.spec.index, group))

    def list_rollout(self, slot: Slot) -> None:
        """A rollout of a running group waits to be handed out. Harmless when it is listed."""
        if not slot.rollout.listed:
            slot.rollout.listed = True
            entry = (slot.place, slot.queue_index, slot.rollout_index, slot)
            heappush(self._lane(slot.group).ready, entry)

    def first_group(self, *, evaluation: bool, away: frozenset[str]) -> Group | None:
        """The group to start next, of a domain that is not held back."""
        first: Group | None = None
        for (purpose, shard, domain), lane in self._lanes.items():
            if purpose is evaluation and shard not in away and domain not in self._held_back:
                group = lane.first_fresh()
                if group and (first is None or _order_of(group) < _order_of(first)):
                    first = group
        return first

    def first_rollout(self, *, evaluation: bool, away: frozenset[str]) -> Slot | None:
        """The rollout to hand out next among those of running groups."""
        first: Slot | None = None
        for (purpose, shard, _), lane in self._lanes.items():
            if purpose is evaluation and shard not in away:
                slot = lane.first_ready()
                if slot and (first is None or slot < first):
                    first = slot
        return first

    def _lane(self, group: Group) -> _Lane:
        spec = group.spec
        domain = spec.domain if spec.domain in self._limited else ""
        return self._lanes[spec.evaluation, spec.shard, domain]


class Claims:
    """The attempts that are with runners, and the rollouts that wait for another."""

    def __init__(self) -> None:
        self._held: dict[TrajectoryId, tuple[Lease, Slot]] = {}
        self._expiries: list[tuple[float, TrajectoryId]] = []
        self._retries: list[tuple[float, Slot]] = []

    def __len__(self) -> int:
        return len(self._held)

    def get(self, trajectory_id: TrajectoryId) -> Lease | None:
        held = self._held.get(trajectory_id)
        return held[0] if held else None

    def hold(self, lease: Lease, slot: Slot) -> None:
        self._held[lease.trajectory_id] = lease, slot
        slot.rollout.phase, slot.rollout.lease = RolloutPhase.LEASED, lease
        heappush(self._expiries, (lease.expires_s, lease.trajectory_id))

    def drop(self, rollout: Rollout) -> None:
        """End the claim on a rollout, if there is one; the caller gives it its next phase."""
        if rollout.lease is not None:
            del self._held[rollout.lease.trajectory_id]
            rollout.lease = None

    def expired(self, now_s: float, *, recheck_s: float) -> Iterator[TrajectoryId]:
        """Claims past their end; one that is not settled comes again after `recheck_s`."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, trajectory_id = heappop(self._expiries)
            lease = self.get(trajectory_id)
            if lease is None:
                continue
            # Renewals only move `expires_s`; the entry is put back in its place when it comes up.
            late = lease.expires_s <= now_s
            next_s = now_s + recheck_s if late else lease.expires_s
            heappush(self._expiries, (next_s, trajectory_id))
            if late:
                yield trajectory_id

    def retry_at(self, ready_s: float, slot: Slot) -> None:
        slot.rollout.phase = RolloutPhase.WAITING
        heappush(self._retries, (ready_s, slot))

    def due_retries(self, now_s: float) -> Iterator[Slot]:
        """Rollouts whose back-off is over; they are READY again."""
        while self._retries and self._retries[0][0] <= now_s:
            _, slot = heappop(self._retries)
            if slot.group.phase.open and slot.rollout.phase is RolloutPhase.WAITING:
                slot.rollout.phase = RolloutPhase.READY
                yield slot

    def next_expiry_s(self) -> float | None:
        """When the next claim ends, at the earliest."""
        return self._expiries[0][0] if self._expiries else None

    def next_retry_s(self) -> float | None:
        """When the next back-off is over."""
        return self._retries[0][0] if self._retries else None
