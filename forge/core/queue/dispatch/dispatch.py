"""The order in which rollouts are leased to runners, and the leases.

Owns the strict order (evaluation first, then by place, then by rollout index), the leases, and the
two timers of rollouts: the end of a lease and the end of a back-off.
`forge.core.queue.selection.selection` decides whether a further group may start.

The cost does not depend on the number of pool shards, reachable or not
(`forge.core.queue.dispatch.lanes`), and grows with the number of kinds of the tasks that wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from forge.core.queue.dispatch.lanes import Item, Key, Lanes
from forge.core.queue.groups import (
    ANY,
    Abilities,
    Group,
    Lease,
    Phase,
    Rollout,
    RolloutPhase,
    TaskKind,
)
from forge.core.trajectory import TrajectoryId

RECHECK_S = 2.0
"""Time until an expired lease that is not settled is reported again."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One rollout of one group, in the order of leases."""

    place: float
    queue_index: int
    rollout_index: int
    group: Group = field(compare=False, repr=False)

    @classmethod
    def of(cls, group: Group, rollout_index: int) -> Slot:
        """The slot of a rollout."""
        return cls(group.place, group.spec.index, rollout_index, group)

    @property
    def rollout(self) -> Rollout:
        """The rollout of the slot."""
        return self.group.rollout(self.rollout_index)


def _to_start(group: Group, shard: str) -> bool:
    return group.phase is Phase.QUEUED and group.spec.shard == shard


def _to_hand_out(slot: Slot, shard: str) -> bool:
    if slot.group.spec.shard != shard:
        return False
    if slot.group.phase is Phase.RUNNING and slot.rollout.phase is RolloutPhase.READY:
        return True
    # A closed group has no rollouts; `Slot.rollout` would create them again.
    if slot.group.phase.open:
        slot.rollout.listed = False
    return False


class Dispatch:
    """The order of leases over any number of pool shards."""

    def __init__(self) -> None:
        self._held_back: set[str] = set()
        self._fresh = {
            purpose: defaultdict[TaskKind, Lanes[Group]](lambda: Lanes(_to_start))
            for purpose in (False, True)
        }
        """Groups to start, by purpose and kind."""
        self._ready = {
            purpose: defaultdict[TaskKind, Lanes[Slot]](lambda: Lanes(_to_hand_out))
            for purpose in (False, True)
        }
        """Rollouts of running groups, by purpose and kind."""

    def hold_back(self, domain: str, skipped: bool) -> None:
        """Whether queued groups of a domain are skipped."""
        (self._held_back.add if skipped else self._held_back.discard)(domain)

    @property
    def holds_back(self) -> bool:
        """Whether any domain is skipped."""
        return bool(self._held_back)

    def list_group(self, group: Group) -> None:
        """`group` is queued."""
        spec = group.spec
        lanes = self._fresh[spec.evaluation][_kind(group)]
        lanes.push(spec.shard, (group.place, spec.index, 0), group)

    def list_rollout(self, slot: Slot) -> None:
        """A rollout of a running group is ready for a lease. Idempotent."""
        if not slot.rollout.listed:
            slot.rollout.listed = True
            key = (slot.place, slot.queue_index, slot.rollout_index)
            lanes = self._ready[slot.group.spec.evaluation][_kind(slot.group)]
            lanes.push(slot.group.spec.shard, key, slot)

    def relocated(self, group: Group) -> None:
        """The group is on another pool shard now; the entries of the former one are void."""
        if group.phase is Phase.QUEUED:
            self.list_group(group)
        elif group.phase is Phase.RUNNING:
            for index, rollout in enumerate(group.rollouts):
                # Also of one in back-off, whose entry may still be listed.
                rollout.listed = False
                # An expired lease does not start again: its token names the former shard.
                rollout.lapsed = None
                if rollout.phase is RolloutPhase.READY:
                    self.list_rollout(Slot.of(group, index))

    def first_group(
        self, *, evaluation: bool, away: frozenset[str], able: Abilities = ANY
    ) -> Group | None:
        """The group to start next, of a domain that is not skipped."""
        skipped = self._held_back
        return _first(
            self._fresh[evaluation],
            away,
            fits=lambda kind: kind.domain not in skipped and able.cover(kind),
        )

    def first_rollout(
        self, *, evaluation: bool, away: frozenset[str], able: Abilities
    ) -> Slot | None:
        """The rollout of a running group to lease next."""
        return _first(self._ready[evaluation], away, fits=able.cover)

    def waiting_kinds(self, away: frozenset[str]) -> set[TaskKind]:
        """The kinds of groups and rollouts that wait for a runner."""
        waiting = set[TaskKind]()
        for purpose in (False, True):
            waiting |= {kind for kind, fresh in self._fresh[purpose].items() if fresh.first(away)}
            waiting |= {kind for kind, ready in self._ready[purpose].items() if ready.first(away)}
        return waiting


def _kind(group: Group) -> TaskKind:
    return TaskKind(group.spec.domain, group.spec.scaffold)


def _first(
    lanes_of: dict[TaskKind, Lanes[Item]], away: frozenset[str], *, fits: Callable[[TaskKind], bool]
) -> Item | None:
    """The item with the lowest key. Forgets each kind without waiting items."""
    first: tuple[Key, Item] | None = None
    ended: list[TaskKind] = []
    for kind, lanes in lanes_of.items():
        if not fits(kind):
            continue
        candidate = lanes.first(away)
        if candidate is None:
            ended += [kind] if lanes.empty else []
        elif first is None or candidate[0] < first[0]:
            first = candidate
    for kind in ended:
        del lanes_of[kind]
    return first[1] if first else None


class LeasedAttempts:
    """Leased attempts, and rollouts in back-off."""

    def __init__(self) -> None:
        self._leases: dict[TrajectoryId, tuple[Lease, Slot]] = {}
        self._of_runners: Counter[str] = Counter()
        self._expiries: list[tuple[float, TrajectoryId]] = []
        self._retries: list[tuple[float, Slot]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, trajectory_id: TrajectoryId) -> Lease | None:
        """The lease of an attempt."""
        entry = self._leases.get(trajectory_id)
        return entry[0] if entry else None

    def of_runner(self, runner_id: str) -> int:
        """The number of leases of a runner."""
        return self._of_runners[runner_id]

    def hold(self, lease: Lease, slot: Slot) -> None:
        """Start a lease."""
        self._of_runners[lease.runner_id] += 1
        self._leases[lease.trajectory_id] = lease, slot
        slot.rollout.phase, slot.rollout.lease = RolloutPhase.LEASED, lease
        heappush(self._expiries, (lease.expires_s, lease.trajectory_id))

    def drop(self, rollout: Rollout) -> None:
        """End the lease of a rollout, if it has one; the caller sets its next phase."""
        if rollout.lease is not None:
            del self._leases[rollout.lease.trajectory_id]
            self._of_runners[rollout.lease.runner_id] -= 1
            if not self._of_runners[rollout.lease.runner_id]:
                del self._of_runners[rollout.lease.runner_id]
            rollout.lease = None

    def give_back(self, trajectory_ids: Iterable[str]) -> Iterator[Slot]:
        """End leases that began in vain; the rollouts are READY again."""
        for trajectory_id in trajectory_ids:
            if entry := self._leases.get(TrajectoryId(trajectory_id)):
                slot = entry[1]
                self.drop(slot.rollout)
                slot.rollout.phase = RolloutPhase.READY
                yield slot

    def expired(self, now_s: float) -> Iterator[TrajectoryId]:
        """Expired leases; one that is not settled is repeated after `RECHECK_S`."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, trajectory_id = heappop(self._expiries)
            lease = self.get(trajectory_id)
            if lease is None:
                continue
            # Renewals change only `expires_s`; the entry of the heap is corrected here.
            late = lease.expires_s <= now_s
            next_s = now_s + RECHECK_S if late else lease.expires_s
            heappush(self._expiries, (next_s, trajectory_id))
            if late:
                yield trajectory_id

    def retry_at(self, ready_s: float, slot: Slot) -> None:
        """Start a back-off."""
        slot.rollout.phase = RolloutPhase.WAITING
        heappush(self._retries, (ready_s, slot))

    def due_retries(self, now_s: float) -> Iterator[Slot]:
        """Rollouts whose back-off ended; they are READY again."""
        while self._retries and self._retries[0][0] <= now_s:
            _, slot = heappop(self._retries)
            if slot.group.phase.open and slot.rollout.phase is RolloutPhase.WAITING:
                slot.rollout.phase = RolloutPhase.READY
                yield slot

    def next_event_s(self) -> list[float]:
        """The earliest end of a lease, and of a back-off."""
        return [heap[0][0] for heap in (self._expiries, self._retries) if heap]
