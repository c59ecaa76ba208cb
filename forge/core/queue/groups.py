"""Groups and rollouts of the generation queue.

Owns their phases and data. `forge.core.queue.dispatch.dispatch` owns the order of leases,
`forge.core.queue.window.window` what may be trained on, `forge.core.queue.group_ledger` the changes
of phase.

    group     QUEUED -> RUNNING -> COMPLETE -> BATCHED -> TRAINED       (training)
                                       ^----------'           '--> COMPLETE on a rewind
              QUEUED -> RUNNING -> EVALUATED                            (evaluation)
              any phase before TRAINED or EVALUATED -> TOMBSTONED
    rollout   READY -> LEASED -> SEALED,   LEASED -> WAITING -> READY on a retry
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge.core.trajectory import TaskId, TrajectoryId, TrajectoryName

NOT_SEALED = -1
SAME_OUTCOME = "every rollout has the same outcome"
"""Reason of a group that dynamic sampling tombstones."""
ERASED = "erased"
"""Reason of a group that was erased before it was settled."""
COUNTED_REASONS = frozenset({SAME_OUTCOME})
"""Reasons by which a pool shard counts tombstoned groups."""


FREED = "its records were freed before the run started over"
"""Reason of a trained group that cannot be trained again."""


class Phase(enum.Enum):
    """Phase of a group."""

    QUEUED = "queued"
    """No rollout was leased under this leader."""
    RUNNING = "running"
    """Started; at least one rollout is not sealed. Counts against N."""
    COMPLETE = "complete"
    """Every rollout is sealed; may be trained on inside the window."""
    BATCHED = "batched"
    """In a batch that is not committed."""
    TRAINED = "trained"
    TOMBSTONED = "tombstoned"
    """Dropped, with a stored reason."""
    EVALUATED = "evaluated"
    """An evaluation group whose rollouts are all sealed."""

    # Hot path: attributes instead of properties, and a hash without a Python call.
    __hash__ = object.__hash__

    def __init__(self, value: str) -> None:
        self.open = value in ("queued", "running")
        """Whether its rollouts may still be sampled."""
        self.consumed = value in ("trained", "tombstoned", "evaluated")
        """Whether the head of the window may pass it."""
        self.droppable = value in ("queued", "running", "complete")
        """Whether an operator may drop it."""


class RolloutPhase(enum.Enum):
    """Phase of a rollout."""

    READY = "ready"
    LEASED = "leased"
    WAITING = "waiting"
    """In back-off after a failure; READY afterwards."""
    SEALED = "sealed"


@dataclass(slots=True, kw_only=True)
class Lease:
    """A runner's lease of one attempt. Its id is the trajectory id."""

    trajectory_id: TrajectoryId
    runner_id: str
    expires_s: float
    deadline_s: float
    """Latest end of renewals, so that a rollout that never ends does not hold the head."""
    renewed_s: float
    """Time of the last renewal or the grant."""
    sealed_before: int
    """Rollouts sealed by the queue before the grant."""


@dataclass(slots=True)
class Rollout:
    """One rollout of a group, over all its attempts."""

    phase: RolloutPhase = RolloutPhase.READY
    attempt: int = 0
    """If sealed, the counted attempt; else the lowest attempt without a known failure: reports of
    lower ones are late."""
    failures: int = 0
    """Failures of the task itself."""
    faults: int = 0
    """Consecutive attempts that the infrastructure ended, as runners reported."""
    losses: int = 0
    """Attempts that the infrastructure ended while other rollouts were sealed."""
    lease: Lease | None = None
    lapsed: Lease | None = None
    """The last lease, if it expired without a report: its runner may still renew it."""
    listed: bool = False
    """Whether the order of leases has an entry for it."""


class TaskKind(NamedTuple):
    """The code that a task needs."""

    domain: str
    scaffold: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The code that a runner has; an empty set: any."""

    domains: frozenset[str] = frozenset()
    scaffolds: frozenset[str] = frozenset()

    def cover(self, kind: TaskKind) -> bool:
        """Whether the runner can do tasks of a kind."""
        return (not self.domains or kind.domain in self.domains) and (
            not self.scaffolds or kind.scaffold in self.scaffolds
        )


ANY = Abilities()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The parts of a task that the queue needs."""

    task_id: TaskId
    index: int
    """Position in the queue of its purpose."""
    domain: str
    shard: str
    scaffold: str = ""
    """Pool shard that holds its trajectories."""
    size: int
    """Rollouts."""
    evaluation: bool = False
    difficulty: float = 0.0
    """0 to 1; 0 if unknown."""
    priority: int = 0
    """Older groups that it may start before."""


class AttemptState(enum.IntEnum):
    """State of an attempt in the pool."""

    OPEN = 1
    SEALED = 2
    ABANDONED = 3
    LOST = 4
    """Abandoned because of the infrastructure."""


@dataclass(frozen=True, slots=True, order=True)
class StoredAttempt:
    """A stored attempt of an earlier term."""

    rollout_index: int
    attempt: int
    state: AttemptState


@dataclass(slots=True, eq=False)
class Group:
    """One task and its rollouts."""

    spec: GroupSpec
    place: float = 0
    """Position in the order of starts: the queue index minus the gain of its priority. Groups in
    the same place start in queue order."""
    phase: Phase = Phase.QUEUED
    rollouts: Sequence[Rollout] = ()
    """Empty until an attempt is known, and after `close`, to save memory."""
    sealed: int = 0
    counted: tuple[int, ...] = ()
    """After `close`: for each rollout the counted attempt, or NOT_SEALED."""
    batch_id: str = ""
    step: int = 0
    """Optimizer step that trained on it."""
    reason: str = ""
    """Reason of the tombstone."""
    moved: bool = False
    """Whether it is on another pool shard than at the begin of the term. The tokens of earlier
    attempts name the former one, which refuses their turns."""

    @property
    def idle(self) -> bool:
        """Pending, without a lease, and in no batch."""
        return self.phase.droppable and all(rollout.lease is None for rollout in self.rollouts)

    def rollout(self, index: int) -> Rollout:
        """One rollout; the group is open."""
        if not self.rollouts:
            self.rollouts = [Rollout() for _ in range(self.spec.size)]
        return self.rollouts[index]

    def close(self) -> None:
        """No rollout will be sampled again: keep only the counted attempts."""
        self.counted = self._counted()
        self.rollouts = ()

    def trajectory_id(self, index: int, attempt: int) -> TrajectoryId:
        """The id of one attempt."""
        name = TrajectoryName(task_id=self.spec.task_id, rollout_index=index, attempt=attempt)
        return name.trajectory_id

    def sealed_ids(self) -> tuple[TrajectoryId, ...]:
        """The counted trajectories, in rollout order."""
        return tuple(
            self.trajectory_id(index, attempt)
            for index, attempt in enumerate(self.counted or self._counted())
            if attempt != NOT_SEALED
        )

    def recall(self, attempts: Iterable[StoredAttempt]) -> None:
        """Restore the attempts of an earlier term."""
        for known in sorted(attempts):
            if known.rollout_index >= self.spec.size:
                continue
            rollout = self.rollout(known.rollout_index)
            if rollout.phase is RolloutPhase.SEALED:
                continue
            if known.state is AttemptState.SEALED:
                rollout.phase, rollout.attempt = RolloutPhase.SEALED, known.attempt
                self.sealed += 1
            elif known.state in (AttemptState.ABANDONED, AttemptState.LOST):
                rollout.failures += known.state is AttemptState.ABANDONED
                rollout.attempt = max(rollout.attempt, known.attempt + 1)
            else:
                rollout.attempt = max(rollout.attempt, known.attempt)

    def _counted(self) -> tuple[int, ...]:
        return tuple(
            rollout.attempt if rollout.phase is RolloutPhase.SEALED else NOT_SEALED
            for rollout in self.rollouts
        )
