"""Messages about the term: its actors, its clock, its pool shards and its status."""

from __future__ import annotations

from dataclasses import dataclass

from forge.core.queue.activity import Activity
from forge.runtime.actors.actor_system import ActorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """References to the peer actors; precedes all other messages."""

    queue: ActorRef
    outcome_writer: ActorRef
    expired_leases: ActorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SetActivity:
    """To commits: pause, drain or resume: stored in the term record, then applied by the queue."""

    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAway:
    """Unreachable pool shards that hold groups."""

    shards: frozenset[str]
    unread: frozenset[str] = frozenset()
    """Shards that have not been read in this term."""
    retiring: frozenset[str] = frozenset()
    """Shards whose groups move away: nothing is leased there."""


@dataclass(frozen=True, slots=True)
class NoteHead:
    """Asks the queue for `lowest_pending`, and stores it in the term record."""


@dataclass(frozen=True, slots=True)
class GetStatus:
    """Answered by a GetSchedulerStatusResponse."""

    with_tombstones: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """The timer of the queue fired."""
