"""The training side of the generation queue: batches go out to trainers and are committed.

Owns trainers' claims and the two phases of a batch. What must be durable is written between the
two: `prepare_commit` names the groups, the caller stores them as TRAINED, `commit` applies it;
`prepare_rewind` and `rewind` alike. Which groups make a batch is `forge.core.queue.window`'s
choice.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from forge.core.errors import FailedPrecondition, NotFound
from forge.core.queue.activity import Activity
from forge.core.queue.admission import QueueSettings
from forge.core.queue.commits import Commits, batch_name, granted_at
from forge.core.queue.group_ledger import Books
from forge.core.queue.groups import Group, Phase
from forge.core.trajectory import TaskId

MAX_WRITE_S = 120.0
"""Longer than any write between a `prepare` and its end takes."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """A trainer's claim on complete groups, in queue order."""

    batch_id: str
    trainer_id: str
    task_ids: tuple[TaskId, ...]
    expires_s: float


class Batches:
    """Every batch of one leader's term, and the commits of all terms."""

    def __init__(
        self, books: Books, settings: QueueSettings, *, term: int, void_before: tuple[int, int]
    ) -> None:
        self._books = books
        self._settings = settings
        self._term = term
        self._issued = 0
        self._open: dict[str, Batch] = {}
        self._committed = Commits()
        self._in_doubt: set[TaskId] = set()
        """Groups of commits that have begun and not ended: a shard may have them as TRAINED."""
        self.void_before = void_before
        """Term and number. What was granted before was taken back by a rewind: what was learned
        from it is in no surviving checkpoint. To be durable before a rewind is applied."""

    def get(self, batch_id: str) -> Batch | None:
        """The open batch of that id."""
        return self._open.get(batch_id)

    def take(
        self, *, trainer_id: str, max_groups: int, can_progress: Callable[[], bool], now_s: float
    ) -> Batch | None:
        """The batch the trainer holds already, or a new one from the window, or none yet.
        `can_progress` says whether a group may become complete as the window stands."""
        expires_s = now_s + self._settings.batch_lease_s
        for held in self._open.values():
            if held.trainer_id == trainer_id:
                held.expires_s = expires_s
                return held
        if self._books.activity is Activity.PAUSED:
            return None
        groups = self._choose(max_groups, can_progress=can_progress, now_s=now_s)
        if not groups:
            return None
        batch_id = batch_name(self._term, self._issued)
        self._issued += 1
        return self._hold(batch_id, trainer_id, groups, expires_s)

    def _choose(self, size: int, *, can_progress: Callable[[], bool], now_s: float) -> list[Group]:
        window, away, growing = self._books.window, self._books.away, self._growing(now_s)
        adaptive = self._books.adaptive
        if adaptive is None:
            return window.take(size, away=away, can_progress=can_progress, growing=growing)
        waiting = window.more_coming(growing=growing) or (window.sampling(away) and can_progress())
        chosen = adaptive.choose(window, size, away=away, waiting=waiting, now_s=now_s)
        window.resize(adaptive.window_size)
        return chosen

    def adopt(self, batch_id: str, task_ids: Sequence[str], *, now_s: float) -> None:
        """Hold what an earlier term granted and its trainer still works on.

        A batch known here is left as it is. One that cannot be held any more is left to its
        commit, which says why.
        """
        if batch_id in self._open or batch_id in self._committed:
            return
        with suppress(NotFound):
            named = map(self._books.group, dict.fromkeys(task_ids))
            self._hold_again(batch_id, list(named), now_s)

    def renew(self, batch_id: str, *, now_s: float) -> None:
        """Raises NotFound when it was taken back."""
        batch = self._open.get(batch_id)
        if batch is None:
            raise NotFound(f"batch_id {batch_id!r} is not held: committed, released or taken back")
        batch.expires_s = now_s + self._settings.batch_lease_s

    def expire(self, now_s: float) -> None:
        """Batches past their end go back into the window."""
        for batch in [each for each in self._open.values() if each.expires_s <= now_s]:
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
        """The groups to store as TRAINED before `commit`; none when all of that is done.

        With `task_ids`, a batch that is not held any more is held again if all its groups are
        still there. Raises NotFound when they are not, FailedPrecondition when the batch was
        committed by another step. `committed_by` and `settled`: what is known elsewhere, the step
        that committed the batch and tasks whose groups are settled.
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
                # There is nothing left to do for what is settled and not held.
                named = [each for each in named if each in self._books or each not in settled]
            groups = map(self._books.group, named)
            left = [group for group in groups if group.batch_id != batch_id]
            if known is not None and not left:
                return ()
            batch = self._hold_again(batch_id, left, now_s)
        self._in_doubt.update(batch.task_ids)
        return self._pin(batch, now_s)

    def committed_by(self, batch_id: str) -> int | None:
        """The step; None for a batch that was not committed, or whose groups are not held."""
        return self._committed.get(batch_id)

    def commit(self, batch_id: str, *, step: int) -> None:
        """Its groups are stored as TRAINED by `step`; `prepare_commit` came first."""
        batch = self._open.pop(batch_id)
        self._committed.add(batch_id, step)
        self._in_doubt.difference_update(batch.task_ids)
        self._books.train(self._groups(batch), step=step)

    def restore(self, batch_id: str, *, step: int) -> None:
        """An earlier term stored a commit."""
        self._committed.add(batch_id, step)

    def prepare_release(self, batch_id: str, *, now_s: float) -> tuple[TaskId, ...]:
        """The groups to store as TOMBSTONED before a `release` with a reason."""
        batch = self._open.get(batch_id)
        return self._pin(batch, now_s) if batch else ()

    def release(self, batch_id: str, reasons: Mapping[str, str] | None = None) -> None:
        """Give a batch back, and tombstone the groups of it that have a reason, by task id.
        Idempotent."""
        batch = self._open.pop(batch_id, None)
        groups = self._groups(batch) if batch else []
        for group in groups:
            group.batch_id = ""
        self._books.move_batch(groups, Phase.BATCHED, Phase.COMPLETE)
        for group in groups:
            if reason := (reasons or {}).get(group.spec.task_id):
                self._books.tombstone(group, reason)

    def prepare_rewind(self, step: int) -> tuple[TaskId, ...]:
        """Take every batch back for good, also those that an earlier term granted or that were
        given back since, and name the groups to store as PENDING."""
        for batch_id in tuple(self._open):
            self.release(batch_id)
        self.void_before = (self._term, self._issued)
        # One that is not held was settled since.
        left = (each for each in self._in_doubt if each in self._books)
        in_doubt = map(self._books.group, left)
        half_stored = [group for group in in_doubt if group.phase is Phase.COMPLETE]
        undone = self._books.trained_after(step) + half_stored
        return tuple(group.spec.task_id for group in undone)

    def rewind(self, step: int) -> int:
        """Groups trained after `step` are visible again; how many."""
        self._committed.undo_after(step)
        self._in_doubt.clear()
        return len(self._books.rewind(step))

    def next_event_s(self) -> tuple[float | None, ...]:
        # A queue that ends makes a short batch due.
        ends_s = self._books.added_s + self._settings.short_batch_after_s
        return (ends_s, min((batch.expires_s for batch in self._open.values()), default=None))

    def _growing(self, now_s: float) -> bool:
        """Whether the queue may become longer; one that got nothing for long is at its end."""
        ends_s = self._books.added_s + self._settings.short_batch_after_s
        return self._books.activity is Activity.RUNNING and now_s < ends_s

    def _hold(
        self, batch_id: str, trainer_id: str, groups: Sequence[Group], expires_s: float
    ) -> Batch:
        for group in groups:
            group.batch_id = batch_id
        self._books.move_batch(groups, Phase.COMPLETE, Phase.BATCHED)
        batch = Batch(
            batch_id=batch_id,
            trainer_id=trainer_id,
            task_ids=tuple(group.spec.task_id for group in groups),
            expires_s=expires_s,
        )
        self._open[batch_id] = batch
        return batch

    def _pin(self, batch: Batch, now_s: float) -> tuple[TaskId, ...]:
        """Keep the claim from ending while the caller writes."""
        batch.expires_s = now_s + max(self._settings.batch_lease_s, MAX_WRITE_S)
        return batch.task_ids

    def _hold_again(self, batch_id: str, groups: Sequence[Group], now_s: float) -> Batch:
        granted = granted_at(batch_id)
        if granted >= (self._term, self._issued):
            raise NotFound(f"batch_id {batch_id!r} was never given out")
        if not groups or granted < self.void_before:
            raise NotFound(f"batch_id {batch_id!r} is not held: its groups went back")
        for group in groups:
            if group.phase is not Phase.COMPLETE:
                raise NotFound(
                    f"batch_id {batch_id!r} is not held, and its group {group.spec.task_id!r} is "
                    f"{group.phase.value} now: discard the step"
                )
        return self._hold(batch_id, "", groups, now_s + self._settings.batch_lease_s)

    def _groups(self, batch: Batch) -> list[Group]:
        return [self._books.group(task_id) for task_id in batch.task_ids]
