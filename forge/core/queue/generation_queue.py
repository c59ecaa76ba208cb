"""The generation queue: windowed FIFO over groups, from submission to the committed batch.

Pure: time is passed in and nothing is stored; what must be durable is named to the caller, who
writes first and applies then. Every operation is O(log n) or amortized O(1) in the groups queued.

    books     every group, its phase and the sums           forge.core.queue.group_ledger
    rollouts  lease, renew, complete, fail, expire          forge.core.queue.rollouts
    batches   take, commit, release, rewind                 forge.core.queue.batches
    window    [H, H+W), and which groups make a batch       forge.core.queue.window
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.queue.adaptive import Adaptive, Bounds
from forge.core.queue.admission import Mode, QueueSettings
from forge.core.queue.batches import Batch, Batches
from forge.core.queue.domain_shares import DomainShares
from forge.core.queue.group_ledger import Books
from forge.core.queue.groups import Group, Phase
from forge.core.queue.rollouts import Rollouts
from forge.core.queue.window import Window
from forge.core.trajectory import TaskId, TrajectoryId


class GenerationQueue:
    """All groups of one leader's term, training and evaluation."""

    def __init__(
        self,
        settings: QueueSettings,
        *,
        term: int = 0,
        void_before: tuple[int, int] = (0, 0),
    ) -> None:
        """`void_before`: what the last rewind of an earlier term took back for good, see
        `Batches.void_before`."""
        self.settings = settings
        self.shares = DomainShares(settings.domain_shares)
        self.books = _books(settings, self.shares)
        self.rollouts = Rollouts(self.books, settings, term=term)
        self.batches = Batches(self.books, settings, term=term, void_before=void_before)

    def add(self, group: Group, *, now_s: float) -> None:
        """Accept a group, new or as an earlier term stored it. Raises InvalidArgument."""
        self.books.add(group, now_s=now_s)
        if group.phase is Phase.TRAINED:
            self.batches.restore(group.batch_id, step=group.step)

    def add_at_rest(
        self, task_ids: Sequence[TaskId], groups: Sequence[Group], *, now_s: float
    ) -> None:
        """`add` for many groups of an earlier term, see `Books.add_at_rest`."""
        self.books.add_at_rest(task_ids, groups, now_s=now_s)
        for group in groups:
            if group.phase is Phase.TRAINED:
                self.batches.restore(group.batch_id, step=group.step)

    def take(self, *, trainer_id: str, max_groups: int, now_s: float) -> Batch | None:
        """The batch the trainer holds already, or a new one from the window, or none yet."""
        return self.batches.take(
            trainer_id=trainer_id,
            max_groups=max_groups,
            can_progress=self.rollouts.can_progress,
            now_s=now_s,
        )

    def expire(self, now_s: float) -> tuple[TrajectoryId, ...]:
        """Take back late batches; the attempts whose claims ended, see `Rollouts.expire`."""
        self.batches.expire(now_s)
        return self.rollouts.expire(now_s)

    def next_event_s(self, now_s: float) -> float | None:
        """When something may change by time alone, at the earliest."""
        events = self.rollouts.next_event_s() + self.batches.next_event_s()
        return min((event for event in events if event is not None and event > now_s), default=None)


def _books(settings: QueueSettings, shares: DomainShares) -> Books:
    strict = settings.mode is Mode.FIFO
    if settings.mode is not Mode.ADAPTIVE:
        window = Window(size=settings.window_size, shares=shares, strict=strict)
        return _over(window, settings)
    bounds = Bounds(
        concurrency=settings.concurrency,
        batch_groups=settings.batch_groups,
        staleness_p99=settings.max_staleness_p99,
        shift_kl=settings.max_shift_kl,
    )
    adaptive = Adaptive(bounds)
    window = Window(size=adaptive.window_size, shares=shares, strict=True)
    return _over(window, settings, adaptive)


def _over(window: Window, settings: QueueSettings, adaptive: Adaptive | None = None) -> Books:
    # What starts before the head cannot fill N and halt all: it is near the head itself.
    limit = adaptive.running_limit if adaptive else settings.concurrency
    reach = min(window.size, limit) - 1
    return Books(window, adaptive, domain_limits=settings.domain_limits, reach=reach)
