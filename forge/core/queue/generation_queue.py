"""The generation queue: windowed FIFO over groups, from submission to the committed batch.

Pure: time is passed in and nothing is stored; the caller writes what must be durable before it
applies a change. Every operation is O(log n) or amortized O(1) in the groups queued.

    ledger     every group and its phase                     forge.core.queue.group_ledger
    rollouts   lease, renew, complete, fail, expire          forge.core.queue.rollouts
    batches    take, commit, release, rewind                 forge.core.queue.batches
    window     [H, H+W)                                      forge.core.queue.window.window
    selection  which groups start, and which make a batch    forge.core.queue.selection.selection
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.queue.activity import Activity
from forge.core.queue.admission import Mode, QueueSettings
from forge.core.queue.batches import Batch, Batches
from forge.core.queue.group_ledger import GroupLedger
from forge.core.queue.groups import Group, Phase
from forge.core.queue.rollouts import Rollouts
from forge.core.queue.selection.adaptive import Adaptive
from forge.core.queue.selection.selection import FixedWindow, Selection
from forge.core.queue.window.domain_shares import DomainShares
from forge.core.queue.window.window import Window
from forge.core.trajectory import TaskId, TrajectoryId


class GenerationQueue:
    """All groups of one leader's term, training and evaluation."""

    def __init__(
        self, settings: QueueSettings, *, term: int = 0, void_before: tuple[int, int] = (0, 0)
    ) -> None:
        """`void_before`: the value of the last term, see `Batches.void_before`."""
        self.settings = settings
        self.shares = DomainShares(settings.domain_shares)
        adaptive = settings.mode is Mode.ADAPTIVE
        self.selection: Selection = Adaptive(settings) if adaptive else FixedWindow(settings)
        strict = adaptive or settings.mode is Mode.FIFO
        window = Window(size=self.selection.window_size, shares=self.shares, strict=strict)
        self.ledger = GroupLedger(window, self.selection, domain_limits=settings.domain_limits)
        self.rollouts = Rollouts(self.ledger, settings, term=term)
        self.batches = Batches(self.ledger, settings, term=term, void_before=void_before)

    @property
    def window(self) -> Window:
        """Read-only for callers."""
        return self.ledger.window

    def begin_at(self, head: int, *, unknown_from: int | None = None) -> None:
        """Every training group with a lower index is settled. Precedes the first group.
        `unknown_from`: see `Window.unknown_from`; ends with `all_read`."""
        self.window.unknown_from = unknown_from
        self.ledger.begin_at(head)

    def all_read(self, *, now_s: float) -> None:
        """The groups of every pool shard were added."""
        self.window.all_known()
        self.rollouts.all_read(now_s=now_s)

    def set_activity(self, activity: Activity) -> None:
        """Set the activity that an operator chose."""
        self.ledger.activity = activity

    def set_away(self, shards: frozenset[str]) -> None:
        """Sets the pool shards that are unreachable from now on."""
        self.ledger.away = shards

    def add_group(self, group: Group, *, now_s: float) -> None:
        """Accept a group, new or as an earlier term stored it. Raises InvalidArgument."""
        self.ledger.add_group(group, now_s=now_s)
        if group.phase is Phase.TRAINED:
            self.batches.restore(group.batch_id, step=group.step)

    def add_at_rest(
        self, task_ids: Sequence[TaskId], groups: Sequence[Group], *, now_s: float
    ) -> None:
        """`add` for many groups of an earlier term, see `GroupLedger.add_at_rest`."""
        self.ledger.add_at_rest(task_ids, groups, now_s=now_s)
        for group in groups:
            if group.phase is Phase.TRAINED:
                self.batches.restore(group.batch_id, step=group.step)

    def take_batch(self, *, trainer_id: str, max_groups: int, now_s: float) -> Batch | None:
        """The batch that the trainer holds, or a new one from the window, or None for now."""
        return self.batches.take_batch(
            trainer_id=trainer_id,
            max_groups=max_groups,
            can_progress=self.rollouts.can_progress,
            now_s=now_s,
        )

    def expire(self, now_s: float) -> tuple[TrajectoryId, ...]:
        """Take back late batches; the attempts with expired leases, see `Rollouts.expire`."""
        self.batches.expire(now_s)
        return self.rollouts.expire(now_s)

    def next_event_s(self, now_s: float) -> float | None:
        """The earliest time at which time alone may change something."""
        events = self.rollouts.next_event_s() + self.batches.next_event_s()
        return min((event for event in events if event is not None and event > now_s), default=None)
