"""Selection of the training group that may start, and of the groups of the next batch.

Owns the interface of that choice, and the choice with a fixed window: modes fifo, greedy and
windowed. `forge.core.queue.selection.adaptive` is the other implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from forge.core.queue.admission import GenerationLimit, QueueSettings
from forge.core.queue.group_counts import GroupCounts
from forge.core.queue.groups import Group, Phase
from forge.core.queue.window.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A trainer's request for a batch."""

    size: int
    away: frozenset[str]
    """Unreachable pool shards."""
    can_progress: Callable[[], bool]
    growing: bool
    """Both as in `Window.take`."""
    now_s: float


class GroupObserver:
    """Receives each change of training groups from the ledger. Ignores all by default."""

    def begin_at(self, head: int) -> None:
        """Every group with a lower index is settled; precedes all other calls."""

    def restored(self, groups: Iterable[Group]) -> None:
        """Groups were added, new or in the phase of an earlier term."""

    def started(self, group: Group, now_s: float) -> None:
        """The first rollout of a group was handed out."""

    def completed(self, group: Group, now_s: float) -> None:
        """All rollouts of a group are sealed."""

    def gave_up(self, group: Group) -> None:
        """A group was tombstoned."""

    def taken(self, groups: Collection[Group]) -> None:
        """Groups went into a batch."""

    def came_back(self, groups: Iterable[Group]) -> None:
        """Groups are complete again: their batch was released, or their step undone."""

    def trained(self, groups: Sequence[Group], *, head: int, queued: int) -> None:
        """A step was committed; `head` is H since then, `queued` counts groups not started."""


class Selection(GroupObserver, ABC):
    """One mode of the queue."""

    admission: str
    """Rule of admission, for the status."""
    running_limit: int
    """Most training groups that may run."""
    window_size: int
    """W."""
    last_shift_kl = 0.0
    """Shift of the last batch that was weighed; 0 where it is not measured."""

    @property
    def staleness_p99(self) -> float:
        """Staleness of recently trained groups, in optimizer steps; 0 where it is not measured."""
        return 0.0

    @abstractmethod
    def admits(self, group: Group, window: Window, counts: GroupCounts) -> bool:
        """Whether a queued group may start once fewer than N groups run."""

    @abstractmethod
    def choose(self, window: Window, demand: Demand) -> list[Group]:
        """The groups of the next batch, in queue order; none while waiting is better."""


class FixedWindow(Selection):
    """W and the rule of admission from the settings; batches by the rules of the window."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self.admission = settings.admission.value
        self.running_limit = settings.concurrency
        self.window_size = settings.window_size

    def admits(self, group: Group, window: Window, counts: GroupCounts) -> bool:
        """Whether `GenerationLimit` lets the group start."""
        n = self._settings.concurrency
        match self._settings.admission:
            case GenerationLimit.RUNNING:
                return True
            case GenerationLimit.WINDOW:
                # A group near the head starts although younger complete groups, which wait beyond
                # the window for the head to move, fill N.
                if group.spec.index < window.head + min(window.size, n):
                    return True
                unfetched = counts.of(Phase.COMPLETE) - window.assigned
                return counts.of(Phase.RUNNING) + unfetched < n
            case GenerationLimit.AHEAD:
                return group.place < window.head + (self._settings.ahead or n)

    def choose(self, window: Window, demand: Demand) -> list[Group]:
        """The next batch of the window."""
        return window.take(
            demand.size,
            away=demand.away,
            can_progress=demand.can_progress,
            growing=demand.growing,
        )
