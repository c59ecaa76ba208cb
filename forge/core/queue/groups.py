"""Groups and their rollouts, as the generation queue keeps them.

Owns the phases a group and each of its rollouts go through and what is remembered about both.
Owns no order and no window: who is next is `forge.core.queue.dispatch`, what may be trained on is
`forge.core.queue.window`, and the moves between phases are made by
`forge.core.queue.generation_queue`.

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

from forge.core.trajectory import TaskId, TrajectoryId, TrajectoryName

NOT_SEALED = -1
SAME_OUTCOME = "every rollout has the same outcome"
"""Why dynamic sampling gives a group up."""
COUNTED_REASONS = frozenset({SAME_OUTCOME})
"""Reasons that a pool shard counts tombstoned groups by."""


class Phase(enum.Enum):
    """Where a group stands."""

    QUEUED = "queued"
    """No rollout of it has been leased under this leader."""
    RUNNING = "running"
    """Started; at least one rollout is not sealed. Takes one of the N places."""
    COMPLETE = "complete"
    """Every rollout is sealed: may be trained on once the window reaches it."""
    BATCHED = "batched"
    """In a batch that is not committed."""
    TRAINED = "trained"
    TOMBSTONED = "tombstoned"
    """Given up, for a recorded reason."""
    EVALUATED = "evaluated"
    """An evaluation group whose rollouts are all sealed."""

    # Looked at several times for each group: an attribute, and a hash that is no Python call.
    __hash__ = object.__hash__

    def __init__(self, value: str) -> None:
        self.open = value in ("queued", "running")
        """Whether rollouts of it may still be sampled."""
        self.consumed = value in ("trained", "tombstoned", "evaluated")
        """Whether the head of the window may pass it."""


class RolloutPhase(enum.Enum):
    READY = "ready"
    LEASED = "leased"
    WAITING = "waiting"
    """Failed; becomes READY when its back-off is over."""
    SEALED = "sealed"


@dataclass(slots=True, kw_only=True)
class Lease:
    """A runner's claim on one attempt. Its id is the trajectory id: one attempt, one claim."""

    trajectory_id: TrajectoryId
    runner_id: str
    expires_s: float
    deadline_s: float
    """No renewal reaches beyond this: a rollout that never ends must not hold the head."""
    renewed_s: float
    """When it was renewed last, or granted."""
    sealed_before: int
    """How many rollouts the queue had sealed when it was granted."""


@dataclass(slots=True)
class Rollout:
    """One member of a group, over all its attempts."""

    phase: RolloutPhase = RolloutPhase.READY
    attempt: int = 0
    """Sealed: the attempt that counts. Else the lowest attempt that is not known to have failed;
    an attempt below it reports too late."""
    failures: int = 0
    """Of the task itself."""
    faults: int = 0
    """Attempts that the infrastructure ended one after the other, by the runners' own word."""
    losses: int = 0
    """Attempts that the infrastructure ended while other rollouts were sealed."""
    lease: Lease | None = None
    lapsed: Lease | None = None
    """The last claim, if it ended without word of its runner: that may still renew it."""
    listed: bool = False
    """Whether the dispatch order holds an entry for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What the queue must know about a task."""

    task_id: TaskId
    index: int
    """Position in the queue of its purpose."""
    domain: str
    shard: str
    """Pool shard that holds its trajectories."""
    size: int
    """Rollouts."""
    evaluation: bool = False
    difficulty: float = 0.0
    """From 0 to 1; 0 when nobody said."""
    priority: int = 0
    """How many older groups it may start before."""


class AttemptState(enum.IntEnum):
    """What the pool says of one attempt."""

    OPEN = 1
    SEALED = 2
    ABANDONED = 3
    LOST = 4
    """Abandoned for a fault of the infrastructure."""


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One attempt that left a record, of an earlier term."""

    rollout_index: int
    attempt: int
    state: AttemptState


@dataclass(slots=True, eq=False)
class Group:
    """One task and its rollouts."""

    spec: GroupSpec
    place: float = 0
    """In the order of starts: the queue index, less what its priority gains. The older one of two
    in the same place is first."""
    phase: Phase = Phase.QUEUED
    rollouts: Sequence[Rollout] = ()
    """Empty until something is known about one, and again once the group is closed: a million
    groups stay small."""
    sealed: int = 0
    counted: tuple[int, ...] = ()
    """Once closed: per rollout, the attempt that was sealed and counts; NOT_SEALED for none."""
    batch_id: str = ""
    step: int = 0
    """Optimizer step that trained it."""
    reason: str = ""
    """Why it was tombstoned."""

    def rollout(self, index: int) -> Rollout:
        if not self.rollouts:
            self.rollouts = [Rollout() for _ in range(self.spec.size)]
        return self.rollouts[index]

    def close(self) -> None:
        """No rollout of it will be sampled any more."""
        self.counted = self._counted()
        self.rollouts = ()

    def trajectory_id(self, index: int, attempt: int) -> TrajectoryId:
        name = TrajectoryName(task_id=self.spec.task_id, rollout_index=index, attempt=attempt)
        return name.trajectory_id

    def sealed_ids(self) -> tuple[TrajectoryId, ...]:
        """The trajectories that count, in rollout order."""
        return tuple(
            self.trajectory_id(index, attempt)
            for index, attempt in enumerate(self.counted or self._counted())
            if attempt != NOT_SEALED
        )

    def recall(self, attempts: Iterable[Attempt]) -> None:
        """Take in what the pool holds of a group of an earlier term."""
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
