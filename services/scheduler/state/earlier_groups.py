"""Restores groups of earlier terms into the state of this term.

Owns the order: the head, the scanned groups, then the counters of the settled groups that the scan
left out. Each part counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from forge.core.queue.generation_queue import GenerationQueue
from forge.core.trajectory import TaskId
from services.scheduler.state.domain_progress import DomainProgress
from services.scheduler.state.dynamic_sampling import EqualRewards
from services.scheduler.state.left_out_groups import LeftOut
from services.scheduler.state.messages.groups import RestoreGroups
from services.scheduler.state.settled_groups import SettledGroups
from services.scheduler.state.stored_group import StoredGroup
from services.scheduler.state.task_catalog import Catalog


class EarlierGroups:
    """The earlier groups of one term."""

    def __init__(
        self,
        queue: GenerationQueue,
        catalog: Catalog,
        settled: SettledGroups,
        progress: DomainProgress,
        equal: EqualRewards,
    ) -> None:
        self._queue = queue
        self._catalog = catalog
        self._settled = settled
        self._progress = progress
        self._equal = equal
        self._joined = -1
        """Number of the last RestoreGroups."""

    def restore(self, groups: Iterable[StoredGroup], *, now_s: float) -> None:
        """Add groups in queue order, with their rollouts; groups in memory are skipped."""
        for at_rest, run in groupby(groups, key=attrgetter("at_rest")):
            together = tuple(run)
            task_ids = [stored.group.spec.task_id for stored in together]
            if at_rest and self._queue.ledger.are_new(task_ids):
                self._restore_at_rest(task_ids, together, now_s=now_s)
            else:
                for stored in together:
                    self.restore_one(stored, now_s=now_s)
        self._settled.forget()

    def _restore_at_rest(
        self, task_ids: Sequence[TaskId], stored: Sequence[StoredGroup], *, now_s: float
    ) -> None:
        """`restore_one` for many groups at once, which is faster."""
        groups, _, entries, tags, outcomes, *_ = zip(*stored, strict=True)
        self._catalog.enter(task_ids, entries, tags)
        self._queue.add_at_rest(task_ids, groups, now_s=now_s)
        self._equal.restored(groups)
        # The newest first: few of the older outcomes are recent ones.
        domains = map(attrgetter("spec.domain"), reversed(groups))
        self._progress.recall(domains, reversed(outcomes))

    def restore_one(self, stored: StoredGroup, *, now_s: float) -> None:
        """Add one group, unless it is in memory."""
        group = stored.group
        task_id = group.spec.task_id
        if task_id in self._queue.ledger:
            return
        self._catalog.enter((task_id,), (stored.entry,), (stored.tag,))
        self._queue.add_group(group, now_s=now_s)
        if not group.phase.open:
            self._catalog.drop_payload(task_id)
        self._equal.restored((group,))
        self._progress.recall((group.spec.domain,), (stored.outcomes,))
        for outcome in stored.outcomes[1::2]:
            self._equal.sealed(group, outcome)

    def leave_out(self, left_out: Iterable[LeftOut]) -> None:
        """Add the counters of settled groups that scans left out, after all other groups."""
        for shard in left_out:
            self._queue.ledger.leave_out(
                shard.shard,
                shard.counts,
                next_index=shard.next_index,
                next_eval_index=shard.next_eval_index,
                last_step=shard.last_step,
            )
            self._equal.left_out(shard.skipped)
            self._progress.recall_counted(shard.completed, shard.recent)

    def restore_joined(self, part: RestoreGroups, *, now_s: float) -> None:
        """Add groups of pool shards that joined during the term."""
        if part.number <= self._joined:
            return
        self._joined = part.number
        if part.holds_all:
            self._settled.hold_all()
        self.restore(part.groups, now_s=now_s)
        self.leave_out(part.left_out)
