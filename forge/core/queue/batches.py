"""The training side of the generation queue: batches are leased to trainers and committed.

Owns the leases of batches and the two phases of a change: `prepare_commit` returns the groups, the
caller stores them as TRAINED, `commit` applies it; `prepare_rewind` and `rewind` alike.
`forge.core.queue.selection.selection` chooses the groups of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from forge.core.errors import FailedPrecondition, NotFound
from forge.core.queue.activity import Activity
from forge.core.queue.admission import QueueSettings
from forge.core.queue.commits import Commits, batch_name, granted_at
from forge.core.queue.group_ledger import GroupLedger
from forge.core.queue.groups import Group, Phase
from forge.core.queue.selection.selection import Demand
from forge.core.trajectory import TaskId

MAX_WRITE_S = 120.0
"""Longer than any write between `prepare_commit` and `commit`."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """A trainer's lease of complete groups, in queue order."""

    batch_id: str
    trainer_id: str
    task_ids: tuple[TaskId, ...]
    expires_s: float


class Batches:
    """Every batch of one leader's term, and the commits of all terms."""

    def __init__(
        self,
        ledger: GroupLedger,
        settings: QueueSettings,
        *,
        term: int,
        void_before: tuple[int, int],
    ) -> None:
        self._ledger = ledger
        self._settings = settings
        self._term = term
        self._issued = 0
        self._open: dict[str, Batch] = {}
        self._committed = Commits()
        self._in_doubt: set[TaskId] = set()
        """Groups of commits between their two phases: a shard may have them as TRAINED."""
        self.void_before = void_before
        """Term and number: a rewind voided the batches granted before, because no surviving
        checkpoint contains them. Must be durable before a rewind is applied."""

    def get(self, batch_id: str) -> Batch | None:
        """A leased batch."""
        return self._open.get(batch_id)

    def take_batch(
        self, *, trainer_id: str, max_groups: int, can_progress: Callable[[], bool], now_s: float
    ) -> Batch | None:
        """Returns the batch that the trainer holds, or a new one from the window, or None for now.
        `can_progress`: whether a group may become complete without another batch first."""
        expires_s = now_s + self._settings.batch_lease_s
        for batch in self._open.values():
            if batch.trainer_id == trainer_id:
                batch.expires_s = expires_s
                return batch
        if self._ledger.activity is Activity.PAUSED:
            return None
        groups = self._choose(max_groups, can_progress=can_progress, now_s=now_s)
        if not groups:
            return None
        batch_id = batch_name(self._term, self._issued)
        self._issued += 1
        return self._hold(batch_id, trainer_id, groups, expires_s)

    def _choose(self, size: int, *, can_progress: Callable[[], bool], now_s: float) -> list[Group]:
        demand = Demand(
            size=size,
            away=self._ledger.away,
            can_progress=can_progress,
            growing=self._growing(now_s),
            now_s=now_s,
        )
        return self._ledger.selection.choose(self._ledger.window, demand)

    def adopt(self, batch_id: str, task_ids: Sequence[str], *, now_s: float) -> None:
        """Lease a batch again that an earlier term granted and its trainer still works on.

        A batch of this term is unchanged. If the lease is impossible, the commit of the batch
        raises the reason.
        """
        if batch_id in self._open or batch_id in self._committed:
            return
        with suppress(NotFound):
            named = map(self._ledger.group, dict.fromkeys(task_ids))
            self._hold_again(batch_id, list(named), now_s)

    def renew(self, batch_id: str, *, now_s: float) -> None:
        """Extend the lease. Raises NotFound if the batch was taken back."""
        batch = self._open.get(batch_id)
        if batch is None:
            raise NotFound(f"batch_id {batch_id!r} is not leased: committed, released or expired")
        batch.expires_s = now_s + self._settings.batch_lease_s

    def expire(self, now_s: float) -> None:
        """Return batches with expired leases to the window."""
        for batch in [b for b in self._open.values() if b.expires_s <= now_s]:
            self.release(batch.batch_id)

    def prepare_commit(
        self,
        batch_id: str,
        *,
        step: int,
        task_ids: Sequence[str],
        now_s: float,
        committed_by: int | None = None,
        settled: Container[str] = (),
    ) -> tuple[TaskId, ...]:
        """Returns the groups to store as TRAINED before `commit`; none if the commit is complete.

        With `task_ids`, a batch that is no longer leased is leased again if all its groups are
        complete. Raises NotFound if they are not, FailedPrecondition if another step committed the
        batch. `committed_by` and `settled` come from the pool: the step that committed the batch,
        and tasks whose groups are settled.
        """
        known = self.committed_by(batch_id)
        if known is None:
            known = committed_by
        if known not in (None, step):
            raise FailedPrecondition(
                f"batch_id {batch_id!r} was committed by step {known}, not by step {step}"
            )
        batch = self._open.get(batch_id)
        if batch is None:
            named = list(dict.fromkeys(task_ids))
            if known is not None:
                # Groups that are settled and not in memory need no change.
                named = [t for t in named if t in self._ledger or t not in settled]
            groups = map(self._ledger.group, named)
            left = [group for group in groups if group.batch_id != batch_id]
            if known is not None and not left:
                return ()
            batch = self._hold_again(batch_id, left, now_s)
        self._in_doubt.update(batch.task_ids)
        return self._pin(batch, now_s)

    def committed_by(self, batch_id: str) -> int | None:
        """The step; None if the batch is not committed, or its groups are not in memory."""
        return self._committed.get(batch_id)

    def commit(self, batch_id: str, *, step: int) -> None:
        """Trains the groups that are stored as TRAINED by `step`; follows `prepare_commit`."""
        batch = self._open.pop(batch_id)
        self._committed.add(batch_id, step)
        self._in_doubt.difference_update(batch.task_ids)
        self._ledger.train(self._groups(batch), step=step)

    def restore(self, batch_id: str, *, step: int) -> None:
        """Restores a commit that an earlier term stored."""
        self._committed.add(batch_id, step)

    def prepare_release(self, batch_id: str, *, now_s: float) -> tuple[TaskId, ...]:
        """The groups to store as TOMBSTONED before a `release` with a reason."""
        batch = self._open.get(batch_id)
        return self._pin(batch, now_s) if batch else ()

    def release(self, batch_id: str, reasons: Mapping[str, str] | None = None) -> None:
        """Return a batch, and tombstone its groups that have a reason, by task id. Idempotent."""
        batch = self._open.pop(batch_id, None)
        groups = self._groups(batch) if batch else []
        for group in groups:
            group.batch_id = ""
        self._ledger.move_batch(groups, Phase.BATCHED, Phase.COMPLETE)
        for group in groups:
            if reason := (reasons or {}).get(group.spec.task_id):
                self._ledger.tombstone(group, reason)

    def prepare_rewind(self, step: int) -> tuple[TaskId, ...]:
        """Void every batch, also those of earlier terms and released ones; the groups to store as
        PENDING."""
        for batch_id in tuple(self._open):
            self.release(batch_id)
        self.void_before = (self._term, self._issued)
        # A group that is not in memory was settled meanwhile.
        left = (task_id for task_id in self._in_doubt if task_id in self._ledger)
        in_doubt = map(self._ledger.group, left)
        half_stored = [group for group in in_doubt if group.phase is Phase.COMPLETE]
        undone = self._ledger.trained_after(step) + half_stored
        return tuple(group.spec.task_id for group in undone)

    def rewind(self, step: int) -> int:
        """Make groups trained after `step` complete again; their number."""
        self._committed.undo_after(step)
        self._in_doubt.clear()
        return len(self._ledger.rewind(step))

    def next_event_s(self) -> tuple[float | None, ...]:
        """Times at which the queue counts as ended, which makes a short batch due, and of the next
        expiry."""
        ends_s = self._ledger.added_s + self._settings.short_batch_after_s
        return (ends_s, min((batch.expires_s for batch in self._open.values()), default=None))

    def _growing(self, now_s: float) -> bool:
        """Whether the queue may still grow: it ends `short_batch_after_s` after the last task."""
        ends_s = self._ledger.added_s + self._settings.short_batch_after_s
        return self._ledger.activity is Activity.RUNNING and now_s < ends_s

    def _hold(
        self, batch_id: str, trainer_id: str, groups: Sequence[Group], expires_s: float
    ) -> Batch:
        for group in groups:
            group.batch_id = batch_id
        self._ledger.move_batch(groups, Phase.COMPLETE, Phase.BATCHED)
        batch = Batch(
            batch_id=batch_id,
            trainer_id=trainer_id,
            task_ids=tuple(group.spec.task_id for group in groups),
            expires_s=expires_s,
        )
        self._open[batch_id] = batch
        return batch

    def _pin(self, batch: Batch, now_s: float) -> tuple[TaskId, ...]:
        """Keep the lease while the caller writes."""
        batch.expires_s = now_s + max(self._settings.batch_lease_s, MAX_WRITE_S)
        return batch.task_ids

    def _hold_again(self, batch_id: str, groups: Sequence[Group], now_s: float) -> Batch:
        granted = granted_at(batch_id)
        if granted >= (self._term, self._issued):
            raise NotFound(f"batch_id {batch_id!r} was never granted")
        if not groups or granted < self.void_before:
            raise NotFound(f"batch_id {batch_id!r} is not leased: its groups were returned")
        for group in groups:
            if group.phase is not Phase.COMPLETE:
                raise NotFound(
                    f"batch_id {batch_id!r} is not leased, and its group {group.spec.task_id!r} is "
                    f"{group.phase.value} now: discard the step"
                )
        return self._hold(batch_id, "", groups, now_s + self._settings.batch_lease_s)

    def _groups(self, batch: Batch) -> list[Group]:
        return [self._ledger.group(task_id) for task_id in batch.task_ids]
