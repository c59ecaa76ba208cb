"""In which order rollouts are handed to runners, and which of them are out.

Owns the strict order (evaluation first, then by place, then by rollout index), the claims
that are out and the two clocks on rollouts: the end of a claim and the end of a back-off. Whether
a further group may start is `forge.core.queue.admission`'s rule;
`forge.core.queue.generation_queue` asks both.

Shards that are away, and how many there are, cost nothing (`forge.core.queue.lanes`); each domain
that has a limit costs a look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from forge.core.queue.groups import Group, Lease, Phase, Rollout, RolloutPhase
from forge.core.queue.lanes import Key, Lanes
from forge.core.trajectory import TrajectoryId

RECHECK_S = 2.0
"""Time after which an expired claim that is not settled is reported again."""


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


def _to_start(group: Group) -> bool:
    return group.phase is Phase.QUEUED


def _to_hand_out(slot: Slot) -> bool:
    if slot.group.phase is Phase.RUNNING and slot.rollout.phase is RolloutPhase.READY:
        return True
    # A closed group has no rollouts: to look at one would make them anew.
    if slot.group.phase.open:
        slot.rollout.listed = False
    return False


class Dispatch:
    """The order of hand-out over any number of shards."""

    def __init__(self, limited: frozenset[str] = frozenset()) -> None:
        """`limited`: domains that may be held back, see `hold_back`."""
        self._limited = limited
        self._held_back: set[str] = set()
        self._fresh: defaultdict[bool, dict[str, Lanes[Group]]] = defaultdict(dict)
        """Groups to start, by purpose and, of those that may be held back, domain."""
        self._ready = {purpose: Lanes(_to_hand_out) for purpose in (False, True)}
        """Rollouts of running groups, by purpose."""

    def hold_back(self, domain: str, held: bool) -> None:
        """Whether groups of a domain that wait to be started are passed over."""
        (self._held_back.add if held else self._held_back.discard)(domain)

    @property
    def holds_back(self) -> bool:
        """Whether any domain is passed over."""
        return bool(self._held_back)

    def list_group(self, group: Group) -> None:
        """`group` waits to be started."""
        spec = group.spec
        domain = spec.domain if spec.domain in self._limited else ""
        fresh = self._fresh[spec.evaluation]
        if domain not in fresh:
            fresh[domain] = Lanes(_to_start)
        fresh[domain].push(spec.shard, (group.place, spec.index, 0), group)

    def list_rollout(self, slot: Slot) -> None:
        """A rollout of a running group waits to be handed out. Harmless when it is listed."""
        if not slot.rollout.listed:
            slot.rollout.listed = True
            key = (slot.place, slot.queue_index, slot.rollout_index)
            self._ready[slot.group.spec.evaluation].push(slot.group.spec.shard, key, slot)

    def first_group(self, *, evaluation: bool, away: frozenset[str]) -> Group | None:
        """The group to start next, of a domain that is not held back."""
        first: tuple[Key, Group] | None = None
        for domain, lanes in self._fresh[evaluation].items():
            if domain not in self._held_back:
                found = lanes.first(away)
                if found and (first is None or found[0] < first[0]):
                    first = found
        return first[1] if first else None

    def first_rollout(self, *, evaluation: bool, away: frozenset[str]) -> Slot | None:
        """The rollout to hand out next among those of running groups."""
        first = self._ready[evaluation].first(away)
        return first[1] if first else None


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

    def expired(self, now_s: float) -> Iterator[TrajectoryId]:
        """Claims past their end; one that is not settled comes again after `RECHECK_S`."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, trajectory_id = heappop(self._expiries)
            lease = self.get(trajectory_id)
            if lease is None:
                continue
            # Renewals only move `expires_s`; the entry is put back in its place when it comes up.
            late = lease.expires_s <= now_s
            next_s = now_s + RECHECK_S if late else lease.expires_s
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
