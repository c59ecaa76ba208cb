"""Groups of earlier terms, put into the state of this one.

Owns the order of that: where the queue begins, then the groups that were scanned, then the counters
of the settled groups that were left out. Every part of it counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from forge.core.queue.generation_queue import GenerationQueue
from forge.core.trajectory import TaskId
from services.scheduler.state.domain_progress import Progress
from services.scheduler.state.dynamic_sampling import EqualRewards
from services.scheduler.state.left_out_groups import LeftOut
from services.scheduler.state.messages import RestoreGroups
from services.scheduler.state.settled_groups import SettledGroups
from services.scheduler.state.stored_group import StoredGroup
from services.scheduler.state.task_catalog import Catalog


class EarlierGroups:
    """Of one term."""

    def __init__(
        self,
        queue: GenerationQueue,
        catalog: Catalog,
        settled: SettledGroups,
        progress: Progress,
        equal: EqualRewards,
    ) -> None:
        self._queue = queue
        self._catalog = catalog
        self._settled = settled
        self._progress = progress
        self._equal = equal
        self._joined = -1
        """Number of the last message of a shard that joined."""

    def restore(self, groups: Iterable[StoredGroup], *, now_s: float) -> None:
        """Groups in queue order, with what became of their rollouts; those that are held are
        passed over."""
        for at_rest, run in groupby(groups, key=attrgetter("at_rest")):
            together = tuple(run)
            task_ids = [one.group.spec.task_id for one in together]
            if at_rest and self._queue.books.are_new(task_ids):
                self._restore_at_rest(task_ids, together, now_s=now_s)
            else:
                for stored in together:
                    self.restore_one(stored, now_s=now_s)
        self._settled.forget()

    def _restore_at_rest(
        self, task_ids: Sequence[TaskId], stored: Sequence[StoredGroup], *, now_s: float
    ) -> None:
        """As `restore_one` would one by one; a new leader has no time for that."""
        groups, _, entries, tags, outcomes, *_ = zip(*stored, strict=True)
        self._catalog.enter(task_ids, entries, tags)
        self._queue.add_at_rest(task_ids, groups, now_s=now_s)
        self._equal.restored(groups)
        # The latest first: of the earlier ones hardly any is among the recent.
        domains = map(attrgetter("spec.domain"), reversed(groups))
        self._progress.recall(domains, reversed(outcomes))

    def restore_one(self, stored: StoredGroup, *, now_s: float) -> None:
        group = stored.group
        task_id = group.spec.task_id
        if task_id in self._queue.books:
            return
        self._catalog.enter((task_id,), (stored.entry,), (stored.tag,))
        self._queue.add(group, now_s=now_s)
        if not group.phase.open:
            self._catalog.drop_payload(task_id)
        self._equal.restored((group,))
        self._progress.recall((group.spec.domain,), (stored.outcomes,))
        for outcome in stored.outcomes[1::2]:
            self._equal.sealed(group, outcome)

    def leave_out(self, left_out: Iterable[LeftOut]) -> None:
        """The counters of settled groups that were not scanned; all others of these shards are
        restored."""
        for one in left_out:
            self._queue.books.leave_out(
                one.shard,
                one.counts,
                next_index=one.next_index,
                next_eval_index=one.next_eval_index,
                last_step=one.last_step,
            )
            self._equal.left_out(one.skipped)
            self._progress.recall_counted(one.completed, one.recent)

    def restore_joined(self, part: RestoreGroups, *, now_s: float) -> None:
        """A part of what shards hold that joined in mid-term."""
        if part.number <= self._joined:
            return
        self._joined = part.number
        if part.holds_all:
            self._settled.hold_all()
        self.restore(part.groups, now_s=now_s)
        self.leave_out(part.left_out)
