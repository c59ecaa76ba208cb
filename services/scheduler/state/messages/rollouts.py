"""Messages about rollouts: leases of runners, and the ends of attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from forge.core.queue.dispatch.failures import FailureKind
from forge.core.queue.groups import ANY, Abilities
from forge.v1 import common_pb2
from services.scheduler.long_polls import new_answer
from services.scheduler.state.messages.groups import NOT_LOOKED_UP, LookedUp


@dataclass(frozen=True, slots=True, kw_only=True)
class DismissRunner:
    """Answers waiting calls of a runner with no rollout."""

    runner_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRollouts:
    """Answered by the future `answer`, done once a rollout is available."""

    runner_id: str
    max_rollouts: int
    abilities: Abilities = ANY
    start_id: str = ""
    lease_bytes: Callable[[common_pb2.Task], int] = common_pb2.Task.ByteSize
    """Upper bound of the size of a task's lease."""
    answer: asyncio.Future[tuple[Grant, ...]] = field(default_factory=new_answer, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One rollout for a runner."""

    trajectory_id: str
    rollout_index: int
    failures: int
    pool_shard: str
    task: common_pb2.Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnRollouts:
    """Grants that reached no runner: the rollouts are ready for the next one."""

    grants: Sequence[Grant]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewRollouts:
    """Answered by the ids of lost leases."""

    lease_ids: Sequence[str]
    runner_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateRollouts:
    """Answered by Located."""

    trajectory_ids: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Trajectories of groups in memory, and the others."""

    by_shard: Mapping[str, Sequence[str]]
    unknown: Mapping[str, str]
    """By trajectory id, the reason: its group has no such rollout."""
    absent: Sequence[str]
    """Their groups are not in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindUnknown:
    """Trajectories whose groups are not in memory. Answered by the reasons of those whose groups
    the pool does not have either, by id, or by a LookUp. Raises Unavailable if an unread shard may
    have a group."""

    trajectory_ids: Sequence[str]
    looked_up: LookedUp = NOT_LOOKED_UP


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """The end of one attempt."""

    trajectory_id: str
    error: str = ""
    permanent: bool = False
    kind: FailureKind = FailureKind.TASK
    silent: bool = False
    """The lease expired without a report; the fields above are unset."""
    summary: common_pb2.TrajectorySummary | None = None
    """The trajectory's record in the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleRollouts:
    """Ends of attempts, reported by runners or found in the pool."""

    reports: Sequence[AttemptReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckExpired:
    """To expired_leases: attempts whose leases expired, by pool shard: read them from the pool."""

    trajectory_ids: Mapping[str, Sequence[str]]
